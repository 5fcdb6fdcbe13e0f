-- Delete tasks that a Go worker completed and whose retention has expired, as asynq's janitor does.
-- KEYS: 1 completed
-- ARGV: 1 task key prefix, 2 how many at most
-- Returns how many ids were removed from the set.
-- Invariant: a task that is still retained stays; a task that is in another list now is removed from the set only.
local now = call('TIME')[1]
local over = call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])
for _, id in ipairs(over) do
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'unique_key')
  call('ZREM', KEYS[1], id)
  -- asynq's result writer leaves a hash without a state behind.
  if not known[1] or known[1] == 'completed' then
    call('DEL', key)
    -- asynq releases the lock when the task completes; a lock that is left would block until its TTL.
    release_lock(known[2], id)
  end
end
return #over
