-- Forget ids that were noted as ours and have no slot any more: it expired, so nobody released it.
-- KEYS: 1 gate (zset: task id -> expiry), 2 ours (set of task ids)
-- ARGV: task ids
-- Returns: how many were forgotten.
-- Invariant: the note of an id that has a slot now stays.
local gone = {}
for _, id in ipairs(ARGV) do
  if not call('ZSCORE', KEYS[1], id) then gone[#gone + 1] = id end
end
return #gone > 0 and call('SREM', KEYS[2], unpack(gone)) or 0
