-- Resume a queue whose row was deleted, and wake the workers.
-- KEYS: 1 paused (string), 2 mark (string: which row)
-- ARGV: 1 mark of the deleted row, 2 channel that announces changed pauses
-- Returns "resumed", or "stale" when another row has paused it since (nothing changed).
-- Invariant: a pause of another row stays.
local mark = call('GET', KEYS[2])
if mark and mark ~= ARGV[1] then return 'stale' end
call('DEL', KEYS[1], KEYS[2])
call('PUBLISH', ARGV[2], '1')
return 'resumed'
