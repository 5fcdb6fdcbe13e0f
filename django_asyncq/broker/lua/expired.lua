-- List tasks of ours whose lease has run out.
-- KEYS: 1 lease, 2 active
-- ARGV: 1 task key prefix, 2 how many at most, 3 how many leases to look at
-- Returns {id, fence, worker, …}. Leases of foreign workers (no fence) are left to their own recoverer.
-- Invariant: no task changes; but an id without message, or one of ours that is not active, is no lease and goes.
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
