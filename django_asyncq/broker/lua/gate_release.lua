-- Release slots of a gate.
-- KEYS: 1 gate (zset: task id -> expiry), 2 retaken (hash: task id -> fence of the run before the retry)
-- ARGV: for each task: id, fence of the finished run ("": release the slot of any run)
-- Returns: how many slots were held.
-- Invariant: a second release, or one of a slot that was not held, changes nothing. A slot that a retry has acquired
--       since the run is kept.
local any_retaken = call('EXISTS', KEYS[2]) == 1
local released = {}
for i = 1, #ARGV, 2 do
  local id, fence = ARGV[i], ARGV[i + 1]
  local retaken = any_retaken and call('HGET', KEYS[2], id)
  if fence == '' or not retaken or tonumber(fence) > (fence_of(retaken) or 0) then
    released[#released + 1] = id
    if retaken then call('HDEL', KEYS[2], id) end
  end
end
return #released > 0 and call('ZREM', KEYS[1], unpack(released)) or 0
