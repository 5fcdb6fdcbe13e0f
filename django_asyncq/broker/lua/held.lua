-- List what a worker has taken and not yet answered for.
-- KEYS: 1 held by the worker   ARGV: 1 task key prefix, 2 worker id
-- Returns {id, fence, …}. Invariant: nothing changes. What asynq's own recoverer gave on is another run's by now, or
-- about to be: it is not listed. Who has lost its hash is, for nobody else can tell of it.
local held = redis.call('HGETALL', KEYS[1])
local listed = {}
for i = 1, #held, 2 do
  local known = redis.call('HMGET', ARGV[1] .. held[i], 'state', 'fence', 'worker')
  if not known[1] or known[1] == 'active' and known[2] == held[i + 1] and known[3] == ARGV[2] then
    listed[#listed + 1] = held[i]
    listed[#listed + 1] = held[i + 1]
  end
end
return listed
