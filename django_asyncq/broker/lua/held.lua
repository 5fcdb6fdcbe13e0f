-- List the tasks that a worker has dequeued and not acknowledged.
-- KEYS: 1 held by the worker   ARGV: 1 task key prefix, 2 worker id
-- Returns {id, fence, …}.
-- Invariant: no task changes. An unreadable fence is removed. A task that asynq's own recoverer has requeued is not
--       listed: it is another run's, or will be. A task that has lost its hash is listed: no other script can name it.
local held = call('HGETALL', KEYS[1])
local listed = {}
for i = 1, #held, 2 do
  local known = call('HMGET', ARGV[1] .. held[i], 'state', 'fence', 'worker')
  if not fence_of(held[i + 1]) then
    call('HDEL', KEYS[1], held[i])
  elseif not known[1] or not is_elsewhere(known[1], 'active') and known[2] == held[i + 1] and known[3] == ARGV[2] then
    listed[#listed + 1] = held[i]
    listed[#listed + 1] = held[i + 1]
  end
end
return listed
