-- Read the states of tasks in Redis.
-- KEYS: 1 pending (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, then task ids
-- Returns state, fence and row of each id, one after the other: state "" without a message or with no state that asynq
--       has, fence "" for none, row "" where the id is that of the row.
-- Invariant: nothing changes.
local reply = {}
for i = 2, #ARGV do
  local known = call('HMGET', ARGV[1] .. ARGV[i], 'state', 'fence', 'row')
  local there = call('HEXISTS', ARGV[1] .. ARGV[i], 'msg') == 1
  reply[#reply + 1] = there and is_state(known[1]) and known[1] or ''
  reply[#reply + 1] = known[2] or ''
  reply[#reply + 1] = known[3] or ''
end
return reply
