-- Note when tasks were first given up by a program that has no handler for them.
-- KEYS: 1 archived (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, then task ids
-- Returns for each the seconds since then; -1 without a message.
-- Invariant: no hash is made. The time survives that the task is pushed again.
local now = tonumber(call('TIME')[1])
local ages = {}
for i = 2, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  local since = past(call('HGET', key, 'unhandled_at'), now)
  local known = call('HEXISTS', key, 'msg') == 1
  if known and not since then call('HSET', key, 'unhandled_at', now) end
  ages[#ages + 1] = known and now - (since or now) or -1
end
return ages
