-- Prolong a lock of one's own.
-- KEYS: 1 lock   ARGV: 1 my value, 2 TTL in ms
-- Returns 1, or 0 when it is not mine any more (nothing changed).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
