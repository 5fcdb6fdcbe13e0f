-- Admit tasks to a gate that has at most `limit` members.
-- KEYS: 1 gate (zset: task id -> expiry, Unix seconds), 2 meta (hash: built, limit, expected_seconds, asked),
--       3 retaken (hash: task id -> fence)
-- ARGV: 1 seconds to hold a slot (0: the full time), 2 limit if meta has none ("": none), 3 expected seconds if meta
--       has none, 4 "all" or "partial", 5 seconds without a request after which the gate must be rebuilt; then for each
--       task: id, fence of the run before the retry ("": not a retry)
-- Returns: {word, limit, occupancy, expected seconds, refused id…}. Words: "unbuilt" (build it, then ask again),
--       "undefined" (no limit), "open" (limit 0 or less), "full" (only with "all": no task was admitted), "admitted".
-- Invariant: after an admission the gate has at most `limit` members. No slot and no TTL gets shorter.
local gate, meta = KEYS[1], KEYS[2]
local now = tonumber(call('TIME')[1])
-- First: if the gate is no zset, it is set aside here, and has to be built.
call('ZREMRANGEBYSCORE', gate, '-inf', now)
local known = call('HMGET', meta, 'built', 'limit', 'expected_seconds', 'asked')
local limit = whole(known[2] or ARGV[2])
local expected = seconds_of(known[3]) and known[3] or ARGV[3]
if not known[1] then return {'unbuilt', 0, 0, '0'} end
if known[2] and not limit then
  call('HDEL', meta, 'built')
  return {'unbuilt', 0, 0, '0'}
end
if not limit then return {'undefined', 0, 0, '0'} end
if limit <= 0 then return {'open', limit, 0, expected} end
if now - (past(known[4], now) or 0) > tonumber(ARGV[5]) then
  -- Redis may have been unreachable: slots of committed rows may have expired before they could be confirmed.
  call('HDEL', meta, 'built')
  return {'unbuilt', 0, 0, '0'}
end
local full_seconds = math.min(math.max(math.ceil(10 * expected), 3600), 86400)
local hold = ARGV[1] == '0' and full_seconds or tonumber(ARGV[1])

local alive = call('ZCARD', gate)
local ids = {}
for i = 6, #ARGV, 2 do ids[#ids + 1] = ARGV[i] end
local scores, wanted = call('ZMSCORE', gate, unpack(ids)), 0
for n = 1, #ids do wanted = wanted + (scores[n] and 0 or 1) end
local free = math.max(limit - alive, 0)
if ARGV[4] == 'all' and wanted > free then return {'full', limit, alive, expected} end

if tonumber(known[4]) ~= now then call('HSET', meta, 'asked', now) end
local reply = {'admitted', limit, alive + math.min(wanted, free), expected}
local held, fresh, retaken = {}, {}, {}
for n, id in ipairs(ids) do
  local slots, fence = scores[n] and held or #fresh < 2 * free and fresh, ARGV[5 + 2 * n]
  if slots then
    slots[#slots + 1], slots[#slots + 2] = now + hold, id
    if fence ~= '' then retaken[#retaken + 1], retaken[#retaken + 2] = id, fence end
  else
    reply[#reply + 1] = id
  end
end
if #held > 0 then call('ZADD', gate, 'XX', 'GT', unpack(held)) end
if #fresh > 0 then call('ZADD', gate, unpack(fresh)) end
if call('TTL', gate) < hold + 60 then call('EXPIRE', gate, hold + 60) end
if #retaken > 0 then
  call('HSET', KEYS[3], unpack(retaken))
  call('EXPIRE', KEYS[3], full_seconds + 60)
end
return reply
