-- Note that a worker process waits at a wake list, and read the lists at which one waits.
-- KEYS: 1 wake lists (zset; score = Unix ms until which each counts)
-- ARGV: 1 the wake list ("": only read), 2 for how many milliseconds it counts
-- Returns {1 if nobody waited at it, or 0, then the lists that count now, a hundred at most}.
-- Invariant: a wake list at which nobody has waited for a while is forgotten.
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local is_new = 0
if ARGV[1] ~= '' then is_new = call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1]) end
return {is_new, unpack(call('ZRANGE', KEYS[1], 0, 99))}
