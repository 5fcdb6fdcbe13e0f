-- Extend the TTL of a lock that is mine.
-- KEYS: 1 lock (string: the owner's value)
-- ARGV: 1 my value, 2 TTL in ms
-- Returns "renewed", or "stale" when it is not mine any more (nothing changed).
-- Invariant: an expired lock is not created again; its former owner has to acquire it.
local lock = KEYS[1]
local mine, ttl_ms = ARGV[1], ARGV[2]

if call('GET', lock) ~= mine then return 'stale' end

call('PEXPIRE', lock, ttl_ms)
return 'renewed'
