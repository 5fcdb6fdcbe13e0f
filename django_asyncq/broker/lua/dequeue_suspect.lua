-- Dequeue one task that must run alone, the one that has waited longest, for a worker that runs nothing else.
-- KEYS: 1 suspects, 2 active, 3 lease, 4 paused, 5 held by this worker
-- ARGV: 1 task key prefix, 2 lease seconds, 3 worker id, 4 milliseconds that the task must have waited
-- Returns {id, fence}; {} when there is none, or when the queue is paused.
-- Invariant: the task is active, leased and held, with a fence above any before. A repeated call returns the task that
--       the worker holds already, and renews its lease. An id without a message, or one that is not pending, is dropped.
local time = redis.call('TIME')
local lease_end = time[1] + ARGV[2]
local held = redis.call('HGETALL', KEYS[5])
for i = 1, #held, 2 do
  local known = redis.call('HMGET', ARGV[1] .. held[i], 'state', 'fence', 'worker')
  if known[1] == 'active' and known[2] == held[i + 1] and known[3] == ARGV[3] then
    redis.call('ZADD', KEYS[3], lease_end, held[i])
    return {held[i], held[i + 1]}
  end
end
if redis.call('EXISTS', KEYS[4]) == 1 then return {} end
local latest = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[4])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', latest, 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[1], id)
  local key = ARGV[1] .. id
  local known = redis.call('HMGET', key, 'state', 'msg', 'fence')
  if known[2] and known[1] == 'pending' then
    local fence = (tonumber(known[3]) or 0) + 1
    redis.call('HSET', key, 'fence', fence, 'state', 'active', 'worker', ARGV[3])
    redis.call('HDEL', key, 'suspect')
    redis.call('LPUSH', KEYS[2], id)
    redis.call('ZADD', KEYS[3], lease_end, id)
    redis.call('HSET', KEYS[5], id, fence)
    return {id, fence}
  end
end
return {}
