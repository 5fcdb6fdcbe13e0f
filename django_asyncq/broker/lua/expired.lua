-- List our tasks whose lease has expired.
-- KEYS: 1 lease, 2 active
-- ARGV: 1 task key prefix, 2 how many tasks at most, 3 how many leases to look at, 4 lease seconds
-- Returns {id, fence, worker, …}. Leases of Go workers (no fence) are left to asynq's recoverer.
-- Invariant: no task changes. An id without a message, or with our fence and not active, loses its lease. A task of ours
--       (only our workers write `worker`) whose fence is unreadable is set aside, and its row brings it back. A lease
--       of ours beyond a day and ten leases begins anew now: nobody may wait for it.
local now = call('TIME')[1]
local latest = now + math.max(86400, 10 * ARGV[4])
for _, id in ipairs(call('ZRANGEBYSCORE', KEYS[1], '(' .. latest, '+inf', 'LIMIT', 0, ARGV[3])) do
  if call('HEXISTS', ARGV[1] .. id, 'fence') == 1 then call('ZADD', KEYS[1], now + ARGV[4], id) end
end
local reply, most = {}, 3 * ARGV[2]
for _, id in ipairs(call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local known = call('HMGET', ARGV[1] .. id, 'state', 'fence', 'worker')
  if call('HEXISTS', ARGV[1] .. id, 'msg') == 0 or (known[2] and is_elsewhere(known[1], 'active')) then
    call('ZREM', KEYS[1], id)
    call('LREM', KEYS[2], 0, id)
  elseif (known[2] or known[3]) and not fence_of(known[2]) then
    set_aside(ARGV[1] .. id)
    call('ZREM', KEYS[1], id)
    call('LREM', KEYS[2], 0, id)
  elseif known[2] and #reply < most then
    reply[#reply + 1] = id
    reply[#reply + 1] = known[2]
    reply[#reply + 1] = known[3] or ''
  end
end
return reply
