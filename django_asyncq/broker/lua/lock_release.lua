-- Give a lock of one's own back.
-- KEYS: 1 lock   ARGV: 1 my value
-- Returns 1, or 0 when it is not mine (nothing changed).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
