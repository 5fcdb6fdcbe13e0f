-- Give a start back that was taken and not used.
-- KEYS: 1 rate (hash)
-- ARGV: 1 when it was taken, Unix µs, 2 interval in µs if the rate has none
-- Returns nothing.
-- Invariant: what is given back is at most what nobody has missed since: an interval less the time that is over. With all
--       of it, a start that came meanwhile could be followed too soon.
local time = call('TIME')
local known = call('HMGET', KEYS[1], 'until', 'interval')
local till, interval = whole(known[1]), whole(known[2]) or tonumber(ARGV[2])
local left = math.min(ARGV[1] + interval - time[1] * 1000000 - time[2], interval)
if till and left > 0 then call('HSET', KEYS[1], 'until', string.format('%.0f', till - left)) end
