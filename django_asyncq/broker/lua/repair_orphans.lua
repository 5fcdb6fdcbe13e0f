-- Repair hashes that are in no list, at most 50 a call. A pending task becomes the next to run. Any other is deleted:
-- only its row knows the time, and the row is pushed again as if Redis had never known it.
-- KEYS: 1 pending, 2 active, 3 priority, 4 lease, 5 scheduled, 6 retry, 7 archived, 8 completed, 9 suspects,
--       10 due (ms)
-- ARGV: 1 task key prefix, 2 wake channel, then ids of tasks that have a row
-- Returns how many were repaired.
-- Invariant: a task that is in any list or in a group stays as it is; so does an active one (see `grant_lease`).
local waits = {pending = true, scheduled = true, retry = true, archived = true, completed = true}
local repaired = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local known = redis.call('HMGET', key, 'state', 'priority', 'unique_key', 'suspect')
  local stays = not waits[known[1]]
  for zset = 3, 9 do stays = stays or redis.call('ZSCORE', KEYS[zset], id) end
  for list = 1, 2 do stays = stays or redis.call('LPOS', KEYS[list], id, 'RANK', -1) end
  if not stays then
    repaired = repaired + 1
    if known[1] ~= 'pending' then
      if known[3] and redis.call('GET', known[3]) == id then redis.call('DEL', known[3]) end
      redis.call('ZREM', KEYS[10], id)
      redis.call('DEL', key)
    elseif known[4] then
      redis.call('ZADD', KEYS[9], 0, id)
    elseif known[2] then
      redis.call('ZADD', KEYS[3], -tonumber(known[2]), id)
      redis.call('PUBLISH', ARGV[2], '1')
    else
      redis.call('RPUSH', KEYS[1], id)
    end
  end
end
return repaired
