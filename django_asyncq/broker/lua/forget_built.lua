-- Have a gate or a rate built again at its next use, because its row may have changed.
-- KEYS: 1 what was built (hash)
-- ARGV: the fields that the row decides
-- Returns: nothing.
-- Invariant: a process that read the row before this call cannot build with it after this call. The deletion comes
--       first: Redis never refuses it, even at maxmemory.
call('HDEL', KEYS[1], 'built', unpack(ARGV))
if not whole(call('HGET', KEYS[1], 'changes') or '0') then call('HDEL', KEYS[1], 'changes') end
call('HINCRBY', KEYS[1], 'changes', 1)
