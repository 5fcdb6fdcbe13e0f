-- Remove tasks from wherever they are.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 completed, 7 active, 8 lease
-- ARGV: 1 task key prefix, 2 held key prefix, then task ids
-- Returns how many were there. Invariant: nothing of them stays, their lock neither, if it is theirs.
local zset = {scheduled = KEYS[3], retry = KEYS[4], archived = KEYS[5], completed = KEYS[6]}
local removed = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local known = redis.call('HMGET', key, 'state', 'priority', 'worker', 'unique_key')
  if known[1] then
    if known[1] == 'pending' then
      redis.call('ZREM', KEYS[2], id)
      if not known[2] then redis.call('LREM', KEYS[1], 0, id) end
    elseif known[1] == 'active' then
      redis.call('LREM', KEYS[7], 0, id)
      redis.call('ZREM', KEYS[8], id)
      if known[3] then redis.call('HDEL', ARGV[2] .. known[3], id) end
    elseif zset[known[1]] then
      redis.call('ZREM', zset[known[1]], id)
    end
    if known[4] and redis.call('GET', known[4]) == id then redis.call('DEL', known[4]) end
    redis.call('DEL', key)
    removed = removed + 1
  end
end
return removed
