-- Make tasks due that wait for code that has them, since a worker with that code is here.
-- KEYS: 1 unknown, 2 scheduled, 3 due (ms)
-- ARGV: 1 task key prefix, 2 due channel, 3 label, 4 how many
-- Returns how many were taken out of unknown; fewer than asked for when none is left.
-- Invariant: a task that waits is due now, in scheduled as before. What has ended or been moved since is forgotten.
local now, made = call('TIME')[1], 0
local low, high = '[' .. ARGV[3] .. '\n', '(' .. ARGV[3] .. '\n\255'
local members = call('ZRANGEBYLEX', KEYS[1], low, high, 'LIMIT', 0, ARGV[4])
for _, member in ipairs(members) do
  local id = string.sub(member, #ARGV[3] + 2)
  local known = call('HMGET', ARGV[1] .. id, 'state', 'parked_at')
  if known[1] == 'scheduled' and known[2] and call('ZSCORE', KEYS[2], id) then
    call('ZREM', KEYS[3], id)
    call('ZADD', KEYS[2], now, id)
    made = made + 1
  end
  call('ZREM', KEYS[1], member)
end
if made > 0 then call('PUBLISH', ARGV[2], '1') end
return #members
