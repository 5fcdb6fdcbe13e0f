-- End a look at the waiters of a gate: forget those that wait no longer, and keep the order of the others.
-- KEYS: 1 meta (hash), 2 waiters (zset: task id -> place)
-- ARGV: 1 "kept", or "" when those that wait can use no free slot, because they wait for other gates too: then others
--       may have it; then ids that wait no longer
-- Returns: nothing.
-- Invariant: no other waiter changes its place.
if #ARGV > 1 then call('ZREM', KEYS[2], unpack(ARGV, 2)) end
if ARGV[1] == 'kept' then
  call('HSET', KEYS[1], 'kept', call('TIME')[1])
else
  call('HDEL', KEYS[1], 'kept')
end
