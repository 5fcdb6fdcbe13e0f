-- End a look at the waiters of a gate: forget those that wait no longer, and keep the order of the others.
-- KEYS: 1 meta (hash), 2 waiters (zset: task id -> place)
-- ARGV: ids that wait no longer
-- Returns: nothing.
-- Invariant: no other waiter changes its place.
if #ARGV > 0 then call('ZREM', KEYS[2], unpack(ARGV)) end
call('HSET', KEYS[1], 'kept', call('TIME')[1])
