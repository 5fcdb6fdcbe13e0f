-- Build a gate from the rows in 0 and 1, after Redis lost its memory or before the first use.
-- KEYS: 1 gate, 2 meta, 3 retaken (hash: task id -> fence)
-- ARGV: 1 the number of changes before the rows were read ("" for none), 2 limit of the Gate row ("" if there is none),
--       3 its expected seconds (or ""), 4 seconds to hold, then for each task: id, fence of its last run that is
--       over (0: none)
-- Returns "built"; "already" when somebody else was first, or "changed" when the limit was changed since: then nothing
--       was written.
-- Invariant: from "built" on, every task in 0 or 1 that was committed by then is a member, and no run that was over by
-- then gives its slot back.
local gate, meta = KEYS[1], KEYS[2]
local known = redis.call('HMGET', meta, 'built', 'changes')
if known[1] then return 'already' end
if (known[2] or '') ~= ARGV[1] then return 'changed' end
local now = tonumber(redis.call('TIME')[1])
local hold = tonumber(ARGV[4])
redis.call('HDEL', meta, 'limit', 'expected_seconds')
if ARGV[2] ~= '' then redis.call('HSET', meta, 'limit', ARGV[2], 'expected_seconds', ARGV[3]) end
for i = 5, #ARGV, 2 do
  redis.call('ZADD', gate, 'GT', now + hold, ARGV[i])
  if ARGV[i + 1] ~= '0' then redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
end
for _, key in ipairs({gate, KEYS[3]}) do
  local ttl = redis.call('TTL', key)
  if ttl ~= -2 and ttl < hold + 60 then redis.call('EXPIRE', key, hold + 60) end
end
redis.call('HSET', meta, 'built', now, 'asked', now)
return 'built'
