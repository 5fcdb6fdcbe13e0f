-- Forget the mark of a pause that another program has ended.
-- KEYS: 1 paused (string), 2 mark (string: which row)
-- ARGV: 1 mark of the row
-- Returns "forgotten", or "stale" when the queue is paused again, or by another row (nothing changed).
-- Invariant: no pause ends here.
if call('GET', KEYS[1]) or call('GET', KEYS[2]) ~= ARGV[1] then return 'stale' end
call('DEL', KEYS[2])
return 'forgotten'
