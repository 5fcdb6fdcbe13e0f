-- Have a gate built anew at its next use: its limit was changed, or may have been.
-- KEYS: 1 meta (hash)   ARGV: none
-- Returns nothing. Invariant: who read the limit before this cannot build with it after this. Deletes first, which is
-- never refused at maxmemory.
redis.call('HDEL', KEYS[1], 'built', 'limit', 'expected_seconds')
redis.call('HINCRBY', KEYS[1], 'changes', 1)
