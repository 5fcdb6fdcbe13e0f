-- Extend the slots of QUEUED and RUNNING tasks, and add the slots that are missing.
-- KEYS: 1 gate (zset: task id -> expiry), 2 ours (set of task ids)
-- ARGV: 1 seconds to hold a slot, then task ids
-- Returns: the ids that had no slot.
-- Invariant: every given task has a slot, even above a limit that was lowered. No slot and no TTL gets shorter.
--       Each given id is noted as ours.
local now = tonumber(call('TIME')[1])
local hold = tonumber(ARGV[1])
local missing, ids = {}, {}
for i = 2, #ARGV do
  ids[#ids + 1] = ARGV[i]
  if not call('ZSCORE', KEYS[1], ARGV[i]) then missing[#missing + 1] = ARGV[i] end
  call('ZADD', KEYS[1], 'GT', now + hold, ARGV[i])
end
note_ours(KEYS[2], ids)
expire_later(KEYS[1], hold + 60)
return missing
