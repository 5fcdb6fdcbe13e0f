-- Give slots of a gate back.
-- KEYS: 1 gate (zset: task id -> expiry), 2 retaken (hash: task id -> fence of the run before the retry)
-- ARGV: for each task: id, fence of the run that has ended ("": it goes, whoever holds it)
-- Returns how many were held.
-- Invariant: releasing twice, or what was never held, changes nothing; a slot that a retry has taken since stays.
local any_retaken = redis.call('EXISTS', KEYS[2]) == 1
local going = {}
for i = 1, #ARGV, 2 do
  local id, fence = ARGV[i], ARGV[i + 1]
  local retaken = any_retaken and redis.call('HGET', KEYS[2], id)
  if fence == '' or not retaken or tonumber(fence) > tonumber(retaken) then
    going[#going + 1] = id
    if retaken then redis.call('HDEL', KEYS[2], id) end
  end
end
return #going > 0 and redis.call('ZREM', KEYS[1], unpack(going)) or 0
