-- Remove tasks from wherever they are, with their locks.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 completed, 7 active, 8 lease, 9 groups, 10 due (ms),
--       11 suspects, 12 fair
-- ARGV: 1 task key prefix, 2 held key prefix, 3 group key prefix, then for each task: id, id of its row or ""
-- Returns how many tasks existed.
-- Invariant: nothing of them is left; an entry that names another row stays, and a lock that another id holds. Pending
--       may be long and is searched only when the hash says so: `dequeue` drops an id without a hash.
local places = {priority = KEYS[2], fair = KEYS[12]}
local removed = 0
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  if not is_of_other(key, ARGV[i + 1]) then
    local known = call('HMGET', key, 'state', 'worker', 'unique_key', 'group', 'waited', 'priority', 'fair')
    local waited = call('ZREM', KEYS[2], id) + call('ZREM', KEYS[11], id)
    -- asynq's tools put tasks into pending whatever their priority.
    if known[1] == 'pending' and waited == 0 then call('LREM', KEYS[1], -1, id) end
    for zset = 3, 6 do call('ZREM', KEYS[zset], id) end
    if known[7] and known[1] == 'pending' then leave_line(places, known[6], known[7]) end
    call('LREM', KEYS[7], 0, id)
    call('ZREM', KEYS[8], id)
    call('ZREM', KEYS[10], id)
    if known[2] then call('HDEL', ARGV[2] .. known[2], id) end
    if known[4] then
      local group = ARGV[3] .. known[4]
      if call('ZREM', group, id) == 1 and call('EXISTS', group) == 0 then
        call('SREM', KEYS[9], known[4])
      end
    end
    release_lock(known[3], id)
    announce_over(known[5], id)
    removed = removed + call('DEL', key)
  end
end
return removed
