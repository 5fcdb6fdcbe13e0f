-- Record that a process reached Redis, and return how long Redis has been reachable without a gap.
-- KEYS: 1 alive (string), 2 reachability (hash: last, resumed; Unix milliseconds)
-- ARGV: 1 milliseconds without a call of this script that count as an outage
-- Returns {Unix seconds since which Redis remembers ("": it does not, or the mark is unreadable), milliseconds since
--       the last outage}.
-- Invariant: the first call after an outage sets its end for all processes.
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = call('HMGET', KEYS[2], 'last', 'resumed')
-- What is unreadable or in the future counts as an outage that has just ended: then nothing is recovered too early.
local resumed = known[2] and (past(known[2], now) or now) or 0
if known[1] and now - (past(known[1], now) or 0) > tonumber(ARGV[1]) then resumed = now end
-- At maxmemory HSET is refused unless the script has written before; this writes nothing and is never refused.
call('HDEL', KEYS[2], '')
call('HSET', KEYS[2], 'last', string.format('%.0f', now), 'resumed', string.format('%.0f', resumed))
local alive = past(call('GET', KEYS[1]), tonumber(time[1]))
return {alive and string.format('%.0f', alive) or '', string.format('%.0f', now - resumed)}
