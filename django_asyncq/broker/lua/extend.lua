-- Renew the leases of all that a worker process holds.
-- KEYS: 1 lease, 2 held by this worker
-- ARGV: 1 task key prefix, 2 lease seconds
-- Returns {how many were renewed, id it has lost, …}; what is lost is not held any more.
-- Invariant: a lease that another run holds, or that nobody holds, is never renewed.
local lease_end = redis.call('TIME')[1] + ARGV[2]
local held = redis.call('HGETALL', KEYS[2])
local reply = {0}
-- At maxmemory ZADD is refused unless the script has written before; this writes nothing and is never refused.
redis.call('HDEL', KEYS[2], '')
for i = 1, #held, 2 do
  local id = held[i]
  if redis.call('HGET', ARGV[1] .. id, 'fence') == held[i + 1] and redis.call('ZSCORE', KEYS[1], id) then
    redis.call('ZADD', KEYS[1], 'XX', lease_end, id)
    reply[1] = reply[1] + 1
  else
    redis.call('HDEL', KEYS[2], id)
    reply[#reply + 1] = id
  end
end
return reply
