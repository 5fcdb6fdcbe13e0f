-- Read what the hashes of tasks of other programs hold: which row they have, and their messages.
-- KEYS: 1 pending (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, 2 largest message in bytes that is read, "" to read none, then task ids
-- Returns for each: the id of its row, "" when its hash names none; its message, "" for none; its size in bytes, or
--       "none". A message that another program wrote may be empty.
-- Invariant: nothing changes.
local reply = {}
local largest = tonumber(ARGV[2])
for i = 3, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  local size = largest and call('HSTRLEN', key, 'msg') or 0
  local is_there = size > 0 or largest and call('HEXISTS', key, 'msg') == 1
  reply[#reply + 1] = call('HGET', key, 'row') or ''
  reply[#reply + 1] = size > 0 and size <= largest and call('HGET', key, 'msg') or ''
  reply[#reply + 1] = is_there and size or 'none'
end
return reply
