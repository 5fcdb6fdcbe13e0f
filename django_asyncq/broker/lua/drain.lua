-- Request that workers take no more tasks, or cancel such requests.
-- KEYS: 1 requests to drain
-- ARGV: 1 seconds for which they hold, 0 to cancel them, then workers or hosts
-- Returns how many requests are new, or were cancelled.
-- Invariant: no request holds for longer than the seconds of the latest one.
local seconds, changed = tonumber(ARGV[1]), 0
local hold_until = call('TIME')[1] + seconds
for i = 2, #ARGV do
  changed = changed + (seconds > 0 and call('HSET', KEYS[1], ARGV[i], hold_until) or call('HDEL', KEYS[1], ARGV[i]))
end
if seconds > 0 then call('EXPIRE', KEYS[1], seconds) end
return changed
