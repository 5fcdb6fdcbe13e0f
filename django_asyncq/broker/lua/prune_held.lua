-- Remove from a worker's held tasks those that it no longer holds, after the worker died.
-- KEYS: 1 held by the worker
-- ARGV: 1 task key prefix, 2 worker id
-- Returns how many were removed.
-- Invariant: a task that this worker dequeued last, with this fence, stays.
local held = call('HGETALL', KEYS[1])
local pruned = 0
for i = 1, #held, 2 do
  local known = call('HMGET', ARGV[1] .. held[i], 'state', 'fence', 'worker')
  if not known[1] or is_elsewhere(known[1], 'active') or known[2] ~= held[i + 1] or known[3] ~= ARGV[2] then
    pruned = pruned + call('HDEL', KEYS[1], held[i])
  end
end
return pruned
