-- Build a gate from the rows in 0 and 1, after Redis lost its memory or before the first use.
-- KEYS: 1 gate, 2 meta
-- ARGV: 1 limit of the Gate row ("" if there is none), 2 its expected seconds (or ""), 3 seconds to hold, 4… task ids
-- Returns "built", or "already" when somebody else was first: then nothing was written.
-- Invariant: from "built" on, every task in 0 or 1 that was committed by then is a member.
local gate, meta = KEYS[1], KEYS[2]
if redis.call('HEXISTS', meta, 'built') == 1 then return 'already' end
local now = tonumber(redis.call('TIME')[1])
local hold = tonumber(ARGV[3])
redis.call('DEL', meta)
if ARGV[1] ~= '' then redis.call('HSET', meta, 'limit', ARGV[1], 'expected_seconds', ARGV[2]) end
for i = 4, #ARGV do redis.call('ZADD', gate, 'GT', now + hold, ARGV[i]) end
if #ARGV >= 4 and redis.call('TTL', gate) < hold + 60 then redis.call('EXPIRE', gate, hold + 60) end
redis.call('HSET', meta, 'built', now)
return 'built'
