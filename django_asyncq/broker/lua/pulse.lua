-- Note that somebody reaches Redis, and tell for how long it has been within reach.
-- KEYS: 1 alive (string), 2 pulse (hash: last, resumed; Unix milliseconds)
-- ARGV: 1 milliseconds without a pulse from which on it counts as having been out of reach
-- Returns {since when it remembers, in Unix seconds ("": it does not), milliseconds since it came back into reach}
-- Invariant: the first pulse after an outage ends it for all.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[2], 'last', 'resumed')
local resumed = tonumber(known[2] or 0)
if known[1] and now - tonumber(known[1]) > tonumber(ARGV[1]) then resumed = now end
-- At maxmemory HSET is refused unless the script has written before; this writes nothing and is never refused.
redis.call('HDEL', KEYS[2], '')
redis.call('HSET', KEYS[2], 'last', string.format('%.0f', now), 'resumed', string.format('%.0f', resumed))
return {redis.call('GET', KEYS[1]) or '', string.format('%.0f', now - resumed)}
