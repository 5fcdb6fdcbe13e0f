-- Build a rate: note what its row says, before its first use or after Redis lost its memory.
-- KEYS: 1 rate (hash)
-- ARGV: 1 the value of "changes" before the row was read ("": none), 2 interval in µs of the row ("": no row), 3 its burst
-- Returns: "built"; "already" when another process has built it, "changed" when the row was changed since it was read:
--       then nothing was written.
-- Invariant: the starts that were counted stay counted.
local known = call('HMGET', KEYS[1], 'built', 'changes')
if known[1] then return 'already' end
if (known[2] or '') ~= ARGV[1] then return 'changed' end
call('HDEL', KEYS[1], 'interval', 'burst')
if ARGV[2] ~= '' then call('HSET', KEYS[1], 'interval', ARGV[2], 'burst', ARGV[3]) end
call('HSET', KEYS[1], 'built', call('TIME')[1])
call('EXPIRE', KEYS[1], 3600)
return 'built'
