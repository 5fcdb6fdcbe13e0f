-- Ask the workers of running tasks to stop, at most 200 a call.
-- KEYS: 1 lease (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, 2 channel of requests to stop, then task ids
-- Returns one word for each: "asked" or "missing" (no message: Redis does not know it).
-- Invariant: no hash is made. The field outlives a lost message: the next renewal of the lease reads it.
local words = {}
for i = 3, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  local known = call('HEXISTS', key, 'msg') == 1
  if known then call('HSET', key, 'cancel', 1) end
  call('PUBLISH', ARGV[2], ARGV[i])
  words[#words + 1] = known and 'asked' or 'missing'
end
return words
