-- Make tasks pending, and confirm the gate slots of those that have a gate.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 completed, 7 due (ms); for each gate: members, meta
-- ARGV: 1 task key prefix, 2 wake channel, 3 "again" or "", 4 seconds without an acquire after which a gate is not
--       reliable, 5 number of gates; for each gate: limit and expected seconds, if meta has none; then for each task:
--       id, message, fence ("0": none), priority, lock key or "", lock seconds, number of its gate ("0": none)
-- Returns one word for each: "queued"; or, with nothing changed, "exists", "duplicate" (another id holds the lock) or
--       "no_slot" (it has no slot that can be relied on: acquire one first).
-- Invariant: an id is in one list; with "again" it moves to pending from retry, archived, completed, scheduled, or from
--       where an odd state left it. No fence falls. No slot is acquired or shortened. Refused tasks take no lock.
local time = call('TIME')
local now, now_ns = tonumber(time[1]), time[1] .. ('00000' .. time[2]):sub(-6) .. '000'
local place = {scheduled = KEYS[3], retry = KEYS[4], archived = KEYS[5], completed = KEYS[6]}
local words, gates, woke = {}, {}, false
for number = 1, tonumber(ARGV[5]) do
  local members, meta = KEYS[6 + 2 * number], KEYS[7 + 2 * number]
  local known = call('HMGET', meta, 'built', 'limit', 'expected_seconds', 'asked')
  local is_reliable = known[1] and now - (past(known[4], now) or 0) <= tonumber(ARGV[4])
  local hold = math.min(math.max(math.ceil(10 * (seconds_of(known[3]) or ARGV[5 + 2 * number])), 3600), 86400)
  if call('TTL', members) < hold + 60 then call('EXPIRE', members, hold + 60) end
  gates[number] = {members = members, hold = hold, limit = is_reliable and whole(known[2] or ARGV[4 + 2 * number])}
end

local function has_slot(id, gate)
  if not gate.limit or gate.limit <= 0 then return gate.limit end
  if tonumber(call('ZSCORE', gate.members, id) or 0) <= now then return false end
  return call('ZADD', gate.members, 'XX', 'GT', now + gate.hold, id)
end

local function put(key, state, id, message, fence, priority, lock, seconds)
  if state then
    for _, zset in pairs(place[state] and {place[state]} or place) do call('ZREM', zset, id) end
    call('ZREM', KEYS[7], id)
    call('HDEL', key, 'priority', 'parked_at', 'worker', 'outcome', 'outcome_waited', 'suspect')
  end
  call('HSET', key, 'msg', message, 'state', 'pending', 'pending_since', now_ns)
  if lock ~= '' then
    call('SET', lock, id, 'EX', seconds)
    call('HSET', key, 'unique_key', lock)
  end
  if fence ~= '0' and tonumber(fence) > (fence_of(call('HGET', key, 'fence')) or 0) then
    call('HSET', key, 'fence', fence)
  end
  if priority == '0' then return call('LPUSH', KEYS[1], id) end
  call('HSET', key, 'priority', priority)
  call('ZADD', KEYS[2], -tonumber(priority), id)
  woke = true
end

for i = 6 + 2 * ARGV[5], #ARGV, 7 do
  local id, key, lock, gate = ARGV[i], ARGV[1] .. ARGV[i], ARGV[i + 4], gates[tonumber(ARGV[i + 6])]
  local state = call('HEXISTS', key, 'msg') == 1 and (call('HGET', key, 'state') or 'none')
  local owner = lock ~= '' and call('GET', lock)
  local word = gate and not has_slot(id, gate) and 'no_slot' or owner and owner ~= id and 'duplicate'
    or state and not (ARGV[3] == 'again' and (place[state] or not is_state(state))) and 'exists' or 'queued'
  if word == 'queued' then put(key, state, unpack(ARGV, i, i + 5)) end
  words[#words + 1] = word
end
if woke then call('PUBLISH', ARGV[2], '1') end
return words
