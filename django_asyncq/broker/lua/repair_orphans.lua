-- Repair hashes that are in no list, at most 50 a call. A pending task becomes the next to run. Any other is deleted:
-- only its row knows the time, and the row is pushed again as if Redis had never known it.
-- KEYS: 1 pending, 2 active, 3 priority, 4 lease, 5 scheduled, 6 retry, 7 archived, 8 completed, 9 suspects,
--       10 due (ms), 11 aggregation sets, 12 tokens (see `waking`), 13 fair
-- ARGV: 1 task key prefix, 2 group key prefix, then ids of tasks that have a row
-- Returns how many were repaired.
-- Invariant: a task that is in any list stays as it is; so does an active one
--       of ours (see `grant_lease`). A state that is unreadable is any other.
local waits = {pending = true, scheduled = true, retry = true, archived = true, completed = true, aggregating = true}
local places = {pending = KEYS[1], priority = KEYS[3], fair = KEYS[13]}
local repaired, pushed = 0, 0
for i = 3, #ARGV do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'priority', 'unique_key', 'fence', 'group', 'suspect', 'rules', 'row', 'fair')
  local stays = not (waits[known[1]] or not is_state(known[1]) or known[1] == 'active' and not known[4])
  for _, zset in ipairs({3, 4, 9}) do stays = stays or call('ZSCORE', KEYS[zset], id) end
  for zset = 5, 8 do stays = stays or dated(call('ZSCORE', KEYS[zset], id)) end
  local has_place = known[1] == 'aggregating' and (known[7] or known[8])
  stays = stays or has_place and is_in_group(KEYS[11], ARGV[2], known[5], id)
  for list = 1, 2 do stays = stays or call('LPOS', KEYS[list], id, 'RANK', -1) end
  if not stays and call('EXISTS', key) == 1 then
    repaired = repaired + 1
    if known[1] ~= 'pending' then
      release_lock(known[3], id)
      for zset = 5, 10 do call('ZREM', KEYS[zset], id) end
      if known[5] then call('ZREM', ARGV[2] .. known[5], id) end
      call('DEL', key)
    elseif known[6] then
      call('ZADD', KEYS[9], 0, id)
    else
      enter_line(places, key, id, known[2], known[9], 'back')
      pushed = pushed + 1
    end
  end
end
wake(KEYS[12], pushed)
return repaired
