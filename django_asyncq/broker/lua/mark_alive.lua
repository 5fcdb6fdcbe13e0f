-- Mark that Redis remembers everything written from now on.
-- KEYS: 1 alive
-- ARGV: none
-- Returns the Unix seconds since which it remembers.
-- Invariant: an existing mark never changes, unless it is unreadable or in the future.
local now = call('TIME')[1]
if not past(call('GET', KEYS[1]), tonumber(now)) then call('SET', KEYS[1], now) end
return call('GET', KEYS[1])
