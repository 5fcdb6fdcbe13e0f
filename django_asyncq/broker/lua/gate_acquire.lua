-- Admit tasks to a gate: at most `limit` members, counted together.
-- KEYS: 1 gate (zset: task id -> expiry, Unix seconds), 2 meta (hash: built, limit, expected_seconds)
-- ARGV: 1 seconds to hold a slot (0: the slot's full time), 2 limit if meta has none ("" for none),
--       3 expected seconds if meta has none, 4 "all" or "partial", 5… task ids
-- Returns {word, limit, occupancy, expected seconds, refused id…}; word: "unbuilt", "undefined", "open", "full" or
--       "admitted" ("full" only with "all": then nobody was added)
-- Invariant: never more than `limit` members after an admission; a member is never shortened, nor is the key's TTL.
local gate, meta = KEYS[1], KEYS[2]
local known = redis.call('HMGET', meta, 'built', 'limit', 'expected_seconds')
local limit = tonumber(known[2] or ARGV[2])
local expected = tonumber(known[3] or ARGV[3])
if not known[1] then return {'unbuilt', 0, 0, '0'} end
if not limit then return {'undefined', 0, 0, '0'} end
if limit <= 0 then return {'open', limit, 0, tostring(expected)} end
local now = tonumber(redis.call('TIME')[1])
local full_seconds = math.min(math.max(math.ceil(10 * expected), 3600), 86400)
local hold = tonumber(ARGV[1])
if hold == 0 then hold = full_seconds end

local fresh, held = {}, {}
local alive = redis.call('ZCOUNT', gate, '(' .. now, '+inf')
for i = 5, #ARGV do
  local score = redis.call('ZSCORE', gate, ARGV[i])
  if score and tonumber(score) > now then held[#held + 1] = ARGV[i] else fresh[#fresh + 1] = ARGV[i] end
end
local free = math.max(limit - alive, 0)
if ARGV[4] == 'all' and #fresh > free then return {'full', limit, alive, tostring(expected)} end

redis.call('ZREMRANGEBYSCORE', gate, '-inf', now)
for _, id in ipairs(held) do redis.call('ZADD', gate, 'XX', 'GT', now + hold, id) end
local reply = {'admitted', limit, 0, tostring(expected)}
for i, id in ipairs(fresh) do
  if i <= free then redis.call('ZADD', gate, now + hold, id) else reply[#reply + 1] = id end
end
reply[3] = redis.call('ZCARD', gate)
if redis.call('TTL', gate) < hold + 60 then redis.call('EXPIRE', gate, hold + 60) end
return reply
