-- Extend the slots of tasks whose row says 0 or 1, and give a slot to those that have none.
-- KEYS: 1 gate   ARGV: 1 seconds to hold, 2… task ids
-- Returns the ids that had no slot. Invariant: what runs is counted, even above a limit that was lowered.
local now = tonumber(redis.call('TIME')[1])
local hold = tonumber(ARGV[1])
local missing = {}
for i = 2, #ARGV do
  if not redis.call('ZSCORE', KEYS[1], ARGV[i]) then missing[#missing + 1] = ARGV[i] end
  redis.call('ZADD', KEYS[1], 'GT', now + hold, ARGV[i])
end
if #ARGV > 1 and redis.call('TTL', KEYS[1]) < hold + 60 then redis.call('EXPIRE', KEYS[1], hold + 60) end
return missing
