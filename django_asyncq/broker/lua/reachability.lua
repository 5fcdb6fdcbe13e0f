-- Record that a process reached Redis, and return how long Redis has been reachable without a gap.
-- KEYS: 1 alive (string), 2 reachability (hash: last, resumed; Unix milliseconds)
-- ARGV: 1 milliseconds without a call of this script that count as an outage
-- Returns {Unix seconds since which Redis remembers ("": it does not), milliseconds since the last outage}.
-- Invariant: the first call after an outage sets its end for all processes.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[2], 'last', 'resumed')
local resumed = tonumber(known[2] or 0)
if known[1] and now - tonumber(known[1]) > tonumber(ARGV[1]) then resumed = now end
-- At maxmemory HSET is refused unless the script has written before; this writes nothing and is never refused.
redis.call('HDEL', KEYS[2], '')
redis.call('HSET', KEYS[2], 'last', string.format('%.0f', now), 'resumed', string.format('%.0f', resumed))
return {redis.call('GET', KEYS[1]) or '', string.format('%.0f', now - resumed)}
