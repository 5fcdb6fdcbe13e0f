-- Take tasks out that wait, with their locks; ask the workers of running ones to stop. At most 50 a call.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 completed, 7 lease, 8 groups, 9 due (ms), 10 suspects
-- ARGV: 1 task key prefix, 2 group key prefix, 3 channel of requests to stop; then for each task: id, fence of its row, its id
--       or ""
-- Returns one word for each: "removed", "active" (it stays, its lease too), "missing" (no hash, or one
--       that names another row) or "overtaken" (it has
--       been pushed or claimed since the row had this fence: nothing is changed).
-- Invariant: nothing is left of a removed task. What a worker has claimed stays until the worker reports it, or its
--       lease expires. A lock that another id holds stays. Pending may be long: it is searched only when the hash says
--       so, and from the oldest, or the removal of a long backlog would search all of it for each task.
local words = {}
for i = 4, #ARGV, 3 do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  local known = call('HMGET', key, 'state', 'unique_key', 'group', 'waited', 'fence')
  if is_of_other(key, ARGV[i + 2]) then
    -- A worker may run it all the same.
    call('PUBLISH', ARGV[3], id)
    words[#words + 1] = 'missing'
  elseif (fence_of(known[5]) or 0) > tonumber(ARGV[i + 1]) then
    words[#words + 1] = 'overtaken'
  elseif known[1] and not is_elsewhere(known[1], 'active') and (known[1] == 'active' or call('ZSCORE', KEYS[7], id)) then
    if call('HEXISTS', key, 'msg') == 1 then call('HSET', key, 'cancel', 1) end
    call('PUBLISH', ARGV[3], id)
    words[#words + 1] = 'active'
  else
    local waited = call('ZREM', KEYS[2], id) + call('ZREM', KEYS[10], id)
    -- asynq's tools put tasks into pending whatever their priority.
    if known[1] == 'pending' and waited == 0 then call('LREM', KEYS[1], -1, id) end
    for zset = 3, 6 do call('ZREM', KEYS[zset], id) end
    call('ZREM', KEYS[9], id)
    if known[3] then
      local group = ARGV[2] .. known[3]
      if call('ZREM', group, id) == 1 and call('EXISTS', group) == 0 then call('SREM', KEYS[8], known[3]) end
    end
    announce_over(known[4], id)
    release_lock(known[2], id)
    local removed = call('DEL', key) == 1
    -- Redis was emptied: a worker may run it all the same, and the row no longer says so, so nobody asks it again.
    if not removed then call('PUBLISH', ARGV[3], id) end
    words[#words + 1] = removed and 'removed' or 'missing'
  end
end
return words
