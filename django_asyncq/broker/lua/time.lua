-- Read the clock of Redis.
-- KEYS: 1 any key of the server that is asked
-- ARGV: none
-- Returns seconds and microseconds.
-- Invariant: nothing is read or written.
return call('TIME')
