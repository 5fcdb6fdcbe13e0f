-- Resume a queue whose row was deleted, and wake the workers.
-- KEYS: 1 paused (string), 2 mark (string: which row)
-- ARGV: 1 mark of the deleted row, "" for none, 2 channel that announces changed pauses
-- Returns "resumed"; "running" when it was not paused; or "stale" when its mark is another one (nothing changed).
-- Invariant: a pause of another row stays.
if (call('GET', KEYS[2]) or '') ~= ARGV[1] then return 'stale' end
local was_paused = call('DEL', KEYS[1]) == 1
call('DEL', KEYS[2])
call('PUBLISH', ARGV[2], '1')
return was_paused and 'resumed' or 'running'
