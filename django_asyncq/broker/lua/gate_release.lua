-- Give slots of a gate back.
-- KEYS: 1 gate (zset)   ARGV: task ids
-- Returns how many were held. Invariant: releasing twice, or what was never held, changes nothing.
return redis.call('ZREM', KEYS[1], unpack(ARGV))
