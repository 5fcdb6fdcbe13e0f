-- Dequeue tasks to run: priorities above 0, then pending from the right, then priorities below 0.
-- KEYS: 1 pending, 2 priority, 3 active, 4 lease, 5 paused, 6 held by this worker, 7 tokens (see `waking`)
-- ARGV: 1 task key prefix, 2 how many, 3 lease seconds, 4 worker id, 5 digest of the names that it knows, or ""
-- Returns {"paused"}, {"left"} (what waits is left to others for now), or {"taken", id, fence, …}; "more" when others
--       were left
-- Invariant: each returned task is active, leased and held, with a fence above any before. An id without a message, or
--       one that is not pending or waits in suspects (it stood here twice), is dropped. One that is left to other
--       programs goes to the end of pending. One that is left to workers with other names keeps its place; left_until
--       has the digests that do not know it behind the time. A queue that is empty now has no tokens; one from which
--       tasks were taken, and that has more, wakes another worker.
local MOST_LEFT, MOST_PASSED, LONGEST_LEFT = 200, 1000, 60
if call('GET', KEYS[5]) then
  -- When it is resumed, that wakes all workers.
  call('DEL', KEYS[7])
  return {'paused'}
end
local wanted, now = tonumber(ARGV[2]), tonumber(call('TIME')[1])
local taken, leases, held, left, passed = {}, {}, {}, {}, {}

-- Return the digests to which a task is not given now; '' when it is left to other programs, nil when to nobody.
local function left_by(text)
  local till, digests = string.match(text, '^(%d+)(.*)$')
  local seconds_left = (whole(till) or 0) - now
  return seconds_left > 0 and seconds_left <= LONGEST_LEFT and digests or nil
end

local function take(id)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'msg', 'fence', 'suspect', 'left_until')
  local digests = known[5] and left_by(known[5])
  if digests == '' then
    left[#left + 1] = id
  elseif digests and ARGV[5] ~= '' and string.find(digests, ' ' .. ARGV[5], 1, true) then
    passed[#passed + 1] = id
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
  local from = #passed
  repeat
    local missing, before = wanted - #taken, #passed
    local found = missing > 0 and call('ZRANGEBYSCORE', KEYS[2], low, high, 'LIMIT', 0, missing) or {}
    if #found > 0 then call('ZREM', KEYS[2], unpack(found)) end
    for _, id in ipairs(found) do take(id) end
  until #passed == before or #passed >= MOST_PASSED
  for i = #passed, from + 1, -1 do
    call('ZADD', KEYS[2], -(whole(call('HGET', ARGV[1] .. passed[i], 'priority')) or 0), passed[i])
  end
end

local has_priorities = call('EXISTS', KEYS[2]) == 1
if has_priorities then take_priority('-inf', '(0') end
local from = #passed
repeat
  local missing, before = wanted - #taken, #left + #passed
  for _, id in ipairs(missing > 0 and call('RPOP', KEYS[1], missing) or {}) do take(id) end
until #left + #passed == before or #left >= MOST_LEFT or #passed >= MOST_PASSED
for i = #passed, from + 1, -1 do call('RPUSH', KEYS[1], passed[i]) end
if has_priorities then take_priority('0', '+inf') end
if #left > 0 then call('LPUSH', KEYS[1], unpack(left)) end
local is_left = #left + #passed > 0
local is_empty = #taken < wanted and not is_left or call('EXISTS', KEYS[1], KEYS[2]) == 0
if is_empty then call('DEL', KEYS[7]) end
if #taken == 0 then return {is_left and 'left' or 'taken'} end
if not is_empty and call('EXISTS', KEYS[7]) == 0 then wake(KEYS[7], 1) end
call('LPUSH', KEYS[3], unpack(taken))
call('ZADD', KEYS[4], unpack(leases))
call('HSET', KEYS[6], unpack(held))
return {is_left and 'more' or 'taken', unpack(held)}
