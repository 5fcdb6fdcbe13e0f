-- List tasks of ours whose lease has run out.
-- KEYS: 1 lease   ARGV: 1 task key prefix, 2 how many at most
-- Returns {id, fence, worker, …}. Leases of foreign workers (no fence) are left to their own recoverer.
-- Invariant: nothing changes, but a lease of an id without hash goes.
local now = redis.call('TIME')[1]
local reply = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local known = redis.call('HMGET', ARGV[1] .. id, 'state', 'fence', 'worker')
  if not known[1] then
    redis.call('ZREM', KEYS[1], id)
  elseif known[2] then
    reply[#reply + 1] = id
    reply[#reply + 1] = known[2]
    reply[#reply + 1] = known[3] or ''
  end
end
return reply
