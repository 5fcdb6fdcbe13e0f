-- Release slots of a gate.
-- KEYS: 1 gate (zset: task id -> expiry), 2 retaken (hash: task id -> fence of the run before the retry),
--       3 waiters (zset: task id -> place), 4 ours (set of task ids)
-- ARGV: 1 channel that announces a free slot, 2 name of the gate, then for each task: id, fence of the finished run
--       ("": release the slot of any run)
-- Returns: how many slots were held.
-- Invariant: a second release, or one of a slot that was not held, changes nothing. A slot that a retry has acquired
--       since the run is kept. Where tasks wait, a released slot is announced. A released id is no longer noted as ours.
local any_retaken = call('EXISTS', KEYS[2]) == 1
local released = {}
for i = 3, #ARGV, 2 do
  local id, fence = ARGV[i], ARGV[i + 1]
  local retaken = any_retaken and call('HGET', KEYS[2], id)
  if fence == '' or not retaken or tonumber(fence) > (fence_of(retaken) or 0) then
    released[#released + 1] = id
    if retaken then call('HDEL', KEYS[2], id) end
  end
end
local held = #released > 0 and call('ZREM', KEYS[1], unpack(released)) or 0
if #released > 0 then call('SREM', KEYS[4], unpack(released)) end
if held > 0 and call('ZCARD', KEYS[3]) > 0 then call('PUBLISH', ARGV[1], ARGV[2]) end
return held
