-- Renew the leases of all that some worker processes hold.
-- KEYS: 1 lease, 2… what each worker holds
-- ARGV: 1 task key prefix, 2 lease seconds
-- Returns for each worker {how many were renewed, id it has lost, …}; what is lost is not held any more.
-- Invariant: a lease that another run holds, or that nobody holds, is never renewed.
local lease_end = redis.call('TIME')[1] + ARGV[2]
local replies = {}
for worker = 2, #KEYS do
  local held, reply = redis.call('HGETALL', KEYS[worker]), {0}
  -- At maxmemory ZADD is refused unless the script has written before; this writes nothing and is never refused.
  redis.call('HDEL', KEYS[worker], '')
  for i = 1, #held, 2 do
    local id = held[i]
    if redis.call('HGET', ARGV[1] .. id, 'fence') == held[i + 1] and redis.call('ZSCORE', KEYS[1], id) then
      redis.call('ZADD', KEYS[1], 'XX', lease_end, id)
      reply[1] = reply[1] + 1
    else
      redis.call('HDEL', KEYS[worker], id)
      reply[#reply + 1] = id
    end
  end
  replies[#replies + 1] = reply
end
return replies
