-- Mark that Redis remembers everything written from now on.
-- KEYS: 1 alive
-- ARGV: none
-- Returns the Unix seconds since which it remembers.
-- Invariant: an existing mark never changes.
redis.call('SETNX', KEYS[1], redis.call('TIME')[1])
return redis.call('GET', KEYS[1])
