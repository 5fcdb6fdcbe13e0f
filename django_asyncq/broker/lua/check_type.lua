-- Set a key aside if it has another type than a command needs; the command has been refused because of it.
-- KEYS: 1 key
-- ARGV: 1 the type it should have
-- Returns 1 when it was set aside, else 0.
-- Invariant: a key of the right type, which somebody may have made in the meantime, stays.
local found = redis.call('TYPE', KEYS[1]).ok
if found == 'none' or found == ARGV[1] then return 0 end
set_aside(KEYS[1])
return 1
