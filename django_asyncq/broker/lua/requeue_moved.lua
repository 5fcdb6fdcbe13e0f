-- Requeue the ids that BLMOVE moved for a worker and that no script has dequeued: its connection broke in between.
-- KEYS: 1 pending, 2 ids moved for the worker   ARGV: none
-- Returns how many. Invariant: each of them is among the next to be dequeued.
local count = 0
while true do
  local moved = call('RPOP', KEYS[2])
  if not moved then return count end
  call('RPUSH', KEYS[1], moved)
  count = count + 1
end
