-- Note when waiting tasks are looked at next, after they were scheduled anew; forget those that wait no more.
-- KEYS: 1 looks (zset: task -> when it is looked at next, Unix µs)
-- ARGV: for each task: the task, when, Unix µs, or "" to forget it
-- Returns nothing.
-- Invariant: nothing is added: one that has started meanwhile waits no more. One that is being looked at stays.
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] ~= '' then
    call('ZADD', KEYS[1], 'XX', ARGV[i + 1], ARGV[i])
  elseif tonumber(call('ZSCORE', KEYS[1], ARGV[i]) or now) > now then
    call('ZREM', KEYS[1], ARGV[i])
  end
end
