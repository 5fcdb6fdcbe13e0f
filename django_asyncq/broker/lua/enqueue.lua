-- Make tasks pending, and confirm the gate slots of those that have a gate.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 completed, 7 due (ms), 8 tokens (see `waking`),
--       9 fair; for each gate: members, meta
-- ARGV: 1 task key prefix, 2 "again" or "", 3 seconds without an acquire after which a gate is not reliable, 4 number
--       of gates; for each gate: limit and expected seconds, if meta has none; then for each task:
--       id, message, fence ("0": none), priority (see `read_line`), lock key or "", its seconds, row or "", number
--       of its gate ("0": none)
-- Returns one word for each: "queued"; or, with nothing changed, "exists", "duplicate" (another id holds the lock) or
--       "no_slot" (it has no slot that can be relied on: acquire one first).
-- Invariant: an id is in one list; with "again" it moves to pending from retry, archived, completed, scheduled, or from
--       an odd state. No fence falls, no slot is acquired or shortened, no refused task takes a lock; a lock that the
--       task of another program (it has a row) holds keeps its TTL.
local time = call('TIME')
local now, now_ns = tonumber(time[1]), time[1] .. ('00000' .. time[2]):sub(-6) .. '000'
local place = {scheduled = KEYS[3], retry = KEYS[4], archived = KEYS[5], completed = KEYS[6]}
local places = {pending = KEYS[1], priority = KEYS[2], fair = KEYS[9]}
local words, gates, queued = {}, {}, 0
for number = 1, tonumber(ARGV[4]) do
  local members, meta = KEYS[8 + 2 * number], KEYS[9 + 2 * number]
  local known = call('HMGET', meta, 'built', 'limit', 'expected_seconds', 'asked')
  local is_reliable = known[1] and now - (past(known[4], now) or 0) <= tonumber(ARGV[3])
  local hold = math.min(math.max(math.ceil(10 * (seconds_of(known[3]) or ARGV[4 + 2 * number])), 3600), 86400)
  if call('TTL', members) < hold + 60 then call('EXPIRE', members, hold + 60) end
  gates[number] = {members = members, hold = hold, limit = is_reliable and whole(known[2] or ARGV[3 + 2 * number])}
end

local function has_slot(id, gate, row)
  if not gate.limit or gate.limit <= 0 then return gate.limit end
  local member = row ~= '' and row or id
  if tonumber(call('ZSCORE', gate.members, member) or 0) <= now then return false end
  return call('ZADD', gate.members, 'XX', 'GT', now + gate.hold, member)
end

local function put(key, state, id, message, fence, priority, lock, seconds, row)
  if state then
    leave(place, KEYS[7], state, id)
    call('HDEL', key, 'priority', 'fair', 'parked_at', 'worker', 'outcome', 'outcome_waited', 'suspect', 'settled', 'result')
  end
  call('HSET', key, 'msg', message, 'state', 'pending', 'pending_since', now_ns)
  if lock ~= '' and (row == '' or call('GET', lock) ~= id) then call('SET', lock, id, 'EX', seconds) end
  if lock ~= '' then call('HSET', key, 'unique_key', lock) end
  if row ~= '' then call('HSET', key, 'row', row) end
  local is_higher = fence ~= '0' and tonumber(fence) > (fence_of(call('HGET', key, 'fence')) or 0)
  if is_higher then call('HSET', key, 'fence', fence) end
  if priority == '0' then return call('LPUSH', KEYS[1], id) end
  local number, fair = read_line(priority)
  if number then call('HSET', key, 'priority', number) end
  enter_line(places, key, id, number, fair)
end

for i = 5 + 2 * ARGV[4], #ARGV, 8 do
  local id, key, lock, gate = ARGV[i], ARGV[1] .. ARGV[i], ARGV[i + 4], gates[tonumber(ARGV[i + 7])]
  local state = call('HEXISTS', key, 'msg') == 1 and (call('HGET', key, 'state') or 'none')
  local owner = lock ~= '' and call('GET', lock)
  local may_move = ARGV[2] == 'again' and may_leave(place, state, key, ARGV[i + 6])
  local word = gate and not has_slot(id, gate, ARGV[i + 6]) and 'no_slot' or owner and owner ~= id and 'duplicate'
    or state and not may_move and 'exists' or 'queued'
  if word == 'queued' then
    put(key, state, unpack(ARGV, i, i + 6))
    queued = queued + 1
  end
  words[#words + 1] = word
end
wake(KEYS[8], queued)
return words
