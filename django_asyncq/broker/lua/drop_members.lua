-- Drop taken members whose rows are in a batch now, or are over; at most 200 a call.
-- KEYS: 1 the taken set, 2 aggregation sets, 3 group, 4 group-rules
-- ARGV: 1 task key prefix, 2 group, 3 "1" in the last call: what is left in the set then goes back to its group, by
--       `reclaim_groups`, then ids
-- Returns how many were dropped.
-- Invariant: an id that is not in the set, or is no longer aggregating, stays as it is. A process that waits for a
--       dropped one looks at its row.
local dropped = 0
for i = 4, #ARGV do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  if call('ZREM', KEYS[1], id) == 1 then
    local known = call('HMGET', key, 'state', 'waited')
    if not is_elsewhere(known[1], 'aggregating') then
      announce_over(known[2], id)
      dropped = dropped + call('DEL', key)
    end
  end
end
if call('EXISTS', KEYS[1]) == 0 then
  call('ZREM', KEYS[2], KEYS[1])
elseif ARGV[3] == '1' then
  call('ZADD', KEYS[2], 0, KEYS[1])
end
if ARGV[3] == '1' and call('EXISTS', KEYS[3]) == 0 then call('HDEL', KEYS[4], ARGV[2]) end
return dropped
