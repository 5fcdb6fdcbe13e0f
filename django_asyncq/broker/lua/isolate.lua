-- Give a task that a worker holds to another one, which runs it with the same fence.
-- KEYS: 1 lease, 2 held by the worker, 3 held by the other one
-- ARGV: 1 task key prefix, 2 id, 3 fence, 4 lease seconds, 5 the other one
-- Returns 1; 0 when the worker no longer holds the task.
-- Invariant: one of both holds it. A repeated call returns 1, and renews the lease.
local key = ARGV[1] .. ARGV[2]
local known = call('HMGET', key, 'fence', 'state')
if known[1] ~= ARGV[3] or is_elsewhere(known[2], 'active') then return 0 end
call('HDEL', KEYS[2], ARGV[2])
call('HSET', KEYS[3], ARGV[2], ARGV[3])
call('HSET', key, 'worker', ARGV[5])
call('ZADD', KEYS[1], call('TIME')[1] + ARGV[4], ARGV[2])
return 1
