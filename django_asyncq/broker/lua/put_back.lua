-- Put back what was moved for a worker that stood by, and that no script has taken: its connection ended in between.
-- KEYS: 1 pending, 2 what is handed to the worker   ARGV: none
-- Returns how many. Invariant: each is the next to be taken.
local count = 0
while true do
  local moved = redis.call('RPOP', KEYS[2])
  if not moved then return count end
  redis.call('RPUSH', KEYS[1], moved)
  count = count + 1
end
