-- Dequeue one task that must run alone, the one that has waited longest, for a worker that runs nothing else.
-- KEYS: 1 suspects, 2 active, 3 lease, 4 paused, 5 held by this worker
-- ARGV: 1 task key prefix, 2 lease seconds, 3 worker id, 4 milliseconds that the task must have waited
-- Returns {id, fence}; {} when there is none, or when the queue is paused.
-- Invariant: the task is active, leased and held, with a fence above any before. A repeated call returns the task that
--       the worker holds already, and renews its lease. An id without a message, or one that is not pending, is dropped.
local time = call('TIME')
local lease_end = time[1] + ARGV[2]
local held = call('HGETALL', KEYS[5])
for i = 1, #held, 2 do
  local known = call('HMGET', ARGV[1] .. held[i], 'state', 'fence', 'worker')
  if known[2] == held[i + 1] and known[3] == ARGV[3] and not is_elsewhere(known[1], 'active') then
    call('ZADD', KEYS[3], lease_end, held[i])
    return {held[i], held[i + 1]}
  end
end
if call('GET', KEYS[4]) then return {} end
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local latest = string.format('%.0f', now_ms - ARGV[4])
-- A time that is yet to come is not one of ours: it counts as now.
for _, id in ipairs(call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now_ms), '+inf', 'LIMIT', 0, 100)) do
  call('ZADD', KEYS[1], string.format('%.0f', now_ms), id)
end
for _, id in ipairs(call('ZRANGEBYSCORE', KEYS[1], '-inf', latest, 'LIMIT', 0, 100)) do
  call('ZREM', KEYS[1], id)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'msg', 'fence')
  if known[2] and not is_elsewhere(known[1], 'pending') then
    local fence = (fence_of(known[3]) or 0) + 1
    call('HSET', key, 'fence', fence, 'state', 'active', 'worker', ARGV[3])
    call('HDEL', key, 'suspect', 'cancel')
    call('LPUSH', KEYS[2], id)
    call('ZADD', KEYS[3], lease_end, id)
    call('HSET', KEYS[5], id, fence)
    return {id, fence}
  end
end
return {}
