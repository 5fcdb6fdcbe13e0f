-- Dequeue tasks to run: priorities above 0, then pending from the right, then priorities below 0.
-- KEYS: 1 pending, 2 priority, 3 active, 4 lease, 5 paused, 6 held by this worker; with handoff: 7 its handoff;
--       behind BLMOVE: 8 ids moved for it
-- ARGV: 1 task key prefix, 2 how many, 3 lease seconds, 4 worker id, 5 the queue behind BLMOVE, where one task is handed
--       to the worker if it is ready; "" when the worker asks by itself
-- Returns {"paused"}, {"not ready"} (behind BLMOVE), {"taken", id, fence, …}; "more" when one was handed and more is left
-- Invariant: each returned task is active, leased and held, with a fence above any before. An id without a message, or
--       one that is not pending or waits in suspects (it stood here twice), is dropped. A worker that gets tasks is no
--       longer ready. A worker that has not read the task it was handed gets no other.
local is_handoff = ARGV[5] ~= ''
if is_handoff then
  -- The id that BLMOVE moved returns to its place first: a task with a higher priority may be due before it.
  local moved = call('RPOP', KEYS[8])
  if moved then call('RPUSH', KEYS[1], moved) end
  local noted = call('HKEYS', KEYS[7])
  if #noted ~= 1 or noted[1] ~= '' then return {'not ready'} end
end
if call('GET', KEYS[5]) then return {'paused'} end
local wanted, ids = tonumber(ARGV[2]), {}

local function take_priority(low, high)
  if #ids >= wanted then return end
  local found = call('ZRANGEBYSCORE', KEYS[2], low, high, 'LIMIT', 0, wanted - #ids)
  for _, id in ipairs(found) do ids[#ids + 1] = id end
  if #found > 0 then call('ZREM', KEYS[2], unpack(found)) end
end

take_priority('-inf', '(0')
if #ids < wanted then
  local found = call('RPOP', KEYS[1], wanted - #ids)
  for _, id in ipairs(found or {}) do ids[#ids + 1] = id end
end
take_priority('0', '+inf')

local lease_end = call('TIME')[1] + ARGV[3]
local taken, leases, held = {}, {}, {}
for _, id in ipairs(ids) do
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'msg', 'fence', 'suspect')
  if known[2] and not known[4] and not is_elsewhere(known[1], 'pending') then
    local fence = (fence_of(known[3]) or 0) + 1
    call('HSET', key, 'fence', fence, 'state', 'active', 'worker', ARGV[4])
    call('HDEL', key, 'pending_since')
    taken[#taken + 1] = id
    leases[#leases + 1] = lease_end
    leases[#leases + 1] = id
    held[#held + 1] = id
    held[#held + 1] = fence
  end
end
if #taken > 0 then
  call('LPUSH', KEYS[3], unpack(taken))
  call('ZADD', KEYS[4], unpack(leases))
  call('HSET', KEYS[6], unpack(held))
  if is_handoff then call('HSET', KEYS[7], ARGV[5], taken[1]) end
  if KEYS[7] then call('HDEL', KEYS[7], '') end
end
local is_more = is_handoff and call('EXISTS', KEYS[1], KEYS[2]) > 0
return {is_more and 'more' or 'taken', unpack(held)}
