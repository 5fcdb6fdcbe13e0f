-- Extend the slots of QUEUED and RUNNING tasks, and add the slots that are missing.
-- KEYS: 1 gate (zset: task id -> expiry)
-- ARGV: 1 seconds to hold a slot, then task ids
-- Returns: the ids that had no slot.
-- Invariant: every given task has a slot, even above a limit that was lowered. No slot and no TTL gets shorter.
local now = tonumber(call('TIME')[1])
local hold = tonumber(ARGV[1])
local missing = {}
for i = 2, #ARGV do
  if not call('ZSCORE', KEYS[1], ARGV[i]) then missing[#missing + 1] = ARGV[i] end
  call('ZADD', KEYS[1], 'GT', now + hold, ARGV[i])
end
if #ARGV > 1 and call('TTL', KEYS[1]) < hold + 60 then call('EXPIRE', KEYS[1], hold + 60) end
return missing
