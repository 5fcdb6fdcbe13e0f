-- Mark a pause that another program has set as that of the row which was made for it.
-- KEYS: 1 paused (string), 2 mark (string: which row)
-- ARGV: 1 mark of the row
-- Returns "noted", "gone" (no longer paused) or "marked" (by another row); with the last two nothing is changed.
-- Invariant: the mark stands only beside a key that was set.
if not call('GET', KEYS[1]) then return 'gone' end
local mark = call('GET', KEYS[2])
if mark and mark ~= ARGV[1] then return 'marked' end
call('SET', KEYS[2], ARGV[1])
return 'noted'
