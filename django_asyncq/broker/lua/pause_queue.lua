-- Pause a queue because a row says so, and mark the pause as that of the row.
-- KEYS: 1 paused (string: Unix seconds), 2 mark (string: which row)
-- ARGV: 1 Unix seconds since which it is paused, 2 mark of the row
-- Returns 1 when the queue was running until now, else 0.
-- Invariant: the mark stands only beside a key that was set. A key that another program has set keeps its time.
local was_running = not call('GET', KEYS[1])
if was_running then call('SET', KEYS[1], ARGV[1]) end
call('SET', KEYS[2], ARGV[2])
return was_running and 1 or 0
