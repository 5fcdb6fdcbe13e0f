-- Tell which tasks Redis does not know.
-- KEYS: 1 pending, which only says where the queue lives   ARGV: 1 task key prefix, then task ids
-- Returns the ids without a message. Invariant: nothing changes.
local gone = {}
for i = 2, #ARGV do
  if redis.call('HEXISTS', ARGV[1] .. ARGV[i], 'msg') == 0 then gone[#gone + 1] = ARGV[i] end
end
return gone
