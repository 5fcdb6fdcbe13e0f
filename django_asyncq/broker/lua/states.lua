-- Tell how tasks stand in Redis.
-- KEYS: 1 pending, which only says where the queue lives   ARGV: 1 task key prefix, then task ids
-- Returns state and fence of each id, one after the other; state "" for one without message, fence "" for none.
-- Invariant: nothing changes.
local reply = {}
for i = 2, #ARGV do
  local known = redis.call('HMGET', ARGV[1] .. ARGV[i], 'state', 'fence')
  local there = redis.call('HEXISTS', ARGV[1] .. ARGV[i], 'msg') == 1
  reply[#reply + 1] = there and (known[1] or 'none') or ''
  reply[#reply + 1] = known[2] or ''
end
return reply
