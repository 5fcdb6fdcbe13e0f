-- Have a gate rebuilt at its next use, because its limit may have changed.
-- KEYS: 1 meta (hash)
-- ARGV: none
-- Returns: nothing.
-- Invariant: a process that read the limit before this call cannot build the gate with it after this call. The deletion
--       comes first: Redis never refuses it, even at maxmemory.
redis.call('HDEL', KEYS[1], 'built', 'limit', 'expected_seconds')
redis.call('HINCRBY', KEYS[1], 'changes', 1)
