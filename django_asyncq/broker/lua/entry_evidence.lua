-- Read what entries say of their tasks, when another program may have changed them.
-- KEYS: 1 scheduled, 2 retry, 3 archived, 4 completed
-- ARGV: 1 task key prefix, 2 largest result in bytes, 3 largest message in bytes, then task ids
-- Returns nine values for each id: state ("" as in `entry_states`), fence, settled ("" when another program has changed
--       the time of a retry since), worker, score in the zset of the state, message, result, size of the result, row
--       that it names; "" for what is missing or larger, and for the message of a task that waits for its first run.
-- Invariant: nothing changes.
local place = {scheduled = KEYS[1], retry = KEYS[2], archived = KEYS[3], completed = KEYS[4]}
local has_run = {active = true, retry = true, archived = true, completed = true}
local reply = {}
local function add(value) reply[#reply + 1] = value or '' end

for i = 4, #ARGV do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  local known = call('HMGET', key, 'state', 'fence', 'settled', 'worker', 'row')
  local size = call('HSTRLEN', key, 'msg')
  local state = size > 0 and is_state(known[1]) and known[1]
  local score = state and place[state] and call('ZSCORE', place[state], id)
  add(state)
  add(known[2])
  add(settled_of(known[3], state, score))
  add(known[4])
  add(score)
  add(state and has_run[state] and size <= tonumber(ARGV[3]) and call('HGET', key, 'msg'))
  local result = state == 'completed' and call('HSTRLEN', key, 'result') or 0
  add(result > 0 and result <= tonumber(ARGV[2]) and call('HGET', key, 'result'))
  add(result)
  add(known[5])
end
return reply
