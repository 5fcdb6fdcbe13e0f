-- List our tasks whose lease has expired.
-- KEYS: 1 lease, 2 active
-- ARGV: 1 task key prefix, 2 how many tasks at most, 3 how many leases to look at
-- Returns {id, fence, worker, …}. Leases of Go workers (no fence) are left to asynq's recoverer.
-- Invariant: no task changes. An id without a message, or with our fence and not active, loses its lease.
local now = redis.call('TIME')[1]
local reply, most = {}, 3 * ARGV[2]
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local known = redis.call('HMGET', ARGV[1] .. id, 'state', 'fence', 'worker')
  if redis.call('HEXISTS', ARGV[1] .. id, 'msg') == 0 or (known[2] and known[1] ~= 'active') then
    redis.call('ZREM', KEYS[1], id)
    redis.call('LREM', KEYS[2], 0, id)
  elseif known[2] and #reply < most then
    reply[#reply + 1] = id
    reply[#reply + 1] = known[2]
    reply[#reply + 1] = known[3] or ''
  end
end
return reply
