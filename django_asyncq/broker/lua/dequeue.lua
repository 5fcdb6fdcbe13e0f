-- Dequeue tasks to run: priorities above 0, then pending from the right, then priorities below 0.
-- KEYS: 1 pending, 2 priority, 3 active, 4 lease, 5 paused, 6 held by this worker; with handoff: 7 its handoff;
--       behind BLMOVE: 8 ids moved for it
-- ARGV: 1 task key prefix, 2 how many, 3 lease seconds, 4 worker id, 5 the queue behind BLMOVE, where one task is handed
--       to the worker if it is ready; "" when the worker asks by itself
-- Returns {"paused"}, {"not ready"} (behind BLMOVE), {"left"} (what waits is left to other programs for now), or
--       {"taken", id, fence, …}; "more" when more may be taken at once
-- Invariant: each returned task is active, leased and held, with a fence above any before. An id without a message, or
--       one that is not pending or waits in suspects (it stood here twice), is dropped; one that is left to others goes
--       to the end of pending. A worker that gets tasks is no longer ready. One that has not read its task gets no other.
local MOST_LEFT, LONGEST_LEFT = 200, 60
if ARGV[5] ~= '' then
  -- The id that BLMOVE moved returns to its place first: a task with a higher priority may be due before it.
  local moved = call('RPOP', KEYS[8])
  if moved then call('RPUSH', KEYS[1], moved) end
  local noted = call('HKEYS', KEYS[7])
  if #noted ~= 1 or noted[1] ~= '' then return {'not ready'} end
end
if call('GET', KEYS[5]) then return {'paused'} end
local wanted, now = tonumber(ARGV[2]), tonumber(call('TIME')[1])
local taken, leases, held, left = {}, {}, {}, {}

local function take(id)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'msg', 'fence', 'suspect', 'left_until')
  local seconds_left = (whole(known[5]) or 0) - now
  if seconds_left > 0 and seconds_left <= LONGEST_LEFT then
    left[#left + 1] = id
  elseif known[2] and not known[4] and not is_elsewhere(known[1], 'pending') then
    local fence = (fence_of(known[3]) or 0) + 1
    call('HSET', key, 'fence', fence, 'state', 'active', 'worker', ARGV[4])
    call('HDEL', key, 'pending_since', 'cancel')
    taken[#taken + 1] = id
    leases[2 * #taken - 1], leases[2 * #taken] = now + ARGV[3], id
    held[2 * #taken - 1], held[2 * #taken] = id, fence
  end
end

local function take_priority(low, high)
  if #taken >= wanted then return end
  local found = call('ZRANGEBYSCORE', KEYS[2], low, high, 'LIMIT', 0, wanted - #taken)
  if #found > 0 then call('ZREM', KEYS[2], unpack(found)) end
  for _, id in ipairs(found) do take(id) end
end

take_priority('-inf', '(0')
repeat
  local missing, passed = wanted - #taken, #left
  for _, id in ipairs(missing > 0 and call('RPOP', KEYS[1], missing) or {}) do take(id) end
until #left == passed or #left >= MOST_LEFT
take_priority('0', '+inf')
if #left > 0 then call('LPUSH', KEYS[1], unpack(left)) end
if #taken == 0 then return {#left > 0 and 'left' or 'taken'} end
call('LPUSH', KEYS[3], unpack(taken))
call('ZADD', KEYS[4], unpack(leases))
call('HSET', KEYS[6], unpack(held))
if ARGV[5] ~= '' then call('HSET', KEYS[7], ARGV[5], taken[1]) end
if KEYS[7] then call('HDEL', KEYS[7], '') end
return {(#left > 0 or ARGV[5] ~= '' and call('EXISTS', KEYS[1], KEYS[2]) > 0) and 'more' or 'taken', unpack(held)}
