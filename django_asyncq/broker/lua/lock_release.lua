-- Release a lock that is mine.
-- KEYS: 1 lock (string: the owner's value)
-- ARGV: 1 my value
-- Returns "released", or "stale" when it is not mine (nothing changed).
-- Invariant: only its owner deletes a lock.
local lock = KEYS[1]
local mine = ARGV[1]

if call('GET', lock) ~= mine then return 'stale' end

call('DEL', lock)
return 'released'
