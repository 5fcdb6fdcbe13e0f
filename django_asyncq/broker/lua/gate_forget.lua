-- Have a gate rebuilt at its next use, because its limit may have changed.
-- KEYS: 1 meta (hash)
-- ARGV: none
-- Returns: nothing.
-- Invariant: a process that read the limit before this call cannot build the gate with it after this call. The deletion
--       comes first: Redis never refuses it, even at maxmemory.
call('HDEL', KEYS[1], 'built', 'limit', 'expected_seconds')
if not whole(call('HGET', KEYS[1], 'changes') or '0') then call('HDEL', KEYS[1], 'changes') end
call('HINCRBY', KEYS[1], 'changes', 1)
