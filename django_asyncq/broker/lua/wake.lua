-- Put the name of a queue into a list at which somebody blocks, unless it is there already.
-- KEYS: 1 the list: a wake list, or the drained queues
-- ARGV: 1 the name, 2 for how many seconds the list is kept
-- Returns 1, or 0 when the name is there already.
-- Invariant: a list that nobody reads has each name once, and expires.
local is_new = not call('LPOS', KEYS[1], ARGV[1])
if is_new then call('RPUSH', KEYS[1], ARGV[1]) end
call('EXPIRE', KEYS[1], ARGV[2])
return is_new and 1 or 0
