-- Add tasks to a group.
-- KEYS: 1 scheduled, 2 retry, 3 archived, 4 completed, 5 due (ms), 6 groups set, 7 group-due, 8 group-rules
-- ARGV: 1 task key prefix, 2 group key prefix, 3 group, 4 its rules or "", 5 "again" or "", 6 due channel, then for
--       each task: id, message, fence ("0": none), priority (see `read_line`), lock key or "", lock seconds, id of
--       its row or ""
-- Returns one word for each: "grouped"; or, with nothing changed, "exists" or "duplicate" (another id holds the lock).
-- Invariant: a group with members is named in the groups set. With "again" an id moves to its group from retry,
--       archived, completed or scheduled. As in asynq, the hash has no unique_key field. No fence falls.
local time = call('TIME')
local place = {scheduled = KEYS[1], retry = KEYS[2], archived = KEYS[3], completed = KEYS[4]}
local places = {groups = KEYS[6], due = KEYS[7], rules = KEYS[8]}
local words, sooner = {}, false

local function put(key, state, id, message, fence, priority, lock, seconds, row)
  if state then
    leave(place, KEYS[5], state, id)
    call('HDEL', key, 'priority', 'fair', 'worker', 'outcome', 'outcome_waited', 'suspect', 'pending_since', 'settled', 'result')
  end
  if lock ~= '' then call('SET', lock, id, 'EX', seconds) end
  call('HSET', key, 'msg', message, 'state', 'aggregating', 'group', ARGV[3])
  if ARGV[4] ~= '' then call('HSET', key, 'rules', ARGV[4]) end
  if row ~= '' then call('HSET', key, 'row', row) end
  if fence ~= '0' and tonumber(fence) > (fence_of(call('HGET', key, 'fence')) or 0) then
    call('HSET', key, 'fence', fence)
  end
  note_line(key, priority)
  sooner = join_group(places, ARGV[2], ARGV[3], id, ARGV[4], time) or sooner
end

for i = 7, #ARGV, 7 do
  local id, key, lock = ARGV[i], ARGV[1] .. ARGV[i], ARGV[i + 4]
  local state = call('HEXISTS', key, 'msg') == 1 and (call('HGET', key, 'state') or 'none')
  local owner = lock ~= '' and call('GET', lock)
  if owner and owner ~= id then
    words[#words + 1] = 'duplicate'
  elseif state and not (ARGV[5] == 'again' and may_leave(place, state, key, ARGV[i + 6])) then
    words[#words + 1] = 'exists'
  else
    put(key, state, unpack(ARGV, i, i + 6))
    words[#words + 1] = 'grouped'
  end
end
if sooner then call('PUBLISH', ARGV[6], '1') end
return words
