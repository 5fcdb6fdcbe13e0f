-- Tell which tasks Redis does not know.
-- KEYS: none of the queue's own   ARGV: 1 task key prefix, then task ids
-- Returns the ids without a hash. Invariant: nothing changes.
local gone = {}
for i = 2, #ARGV do
  if redis.call('EXISTS', ARGV[1] .. ARGV[i]) == 0 then gone[#gone + 1] = ARGV[i] end
end
return gone
