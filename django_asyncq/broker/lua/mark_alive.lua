-- Say that Redis remembers from now on.
-- KEYS: 1 alive   ARGV: none
-- Returns the Unix seconds since when it remembers. Invariant: a mark that is there is never changed.
redis.call('SETNX', KEYS[1], redis.call('TIME')[1])
return redis.call('GET', KEYS[1])
