-- Read how much Redis holds of a queue, for people and monitors.
-- KEYS: 1-4 lists: pending, active, inbox, rejected; 5-10 zsets: priority, suspects, scheduled, retry, archived,
--       completed; 11 the set of groups; 12-15 strings: paused, processed, and processed and failed of the day
-- ARGV: none
-- Returns the length of each of the first eleven, then the strings; false for none
-- Invariant: nothing is written.
local found = {}
for index = 1, 4 do found[index] = call('LLEN', KEYS[index]) end
for index = 5, 10 do found[index] = call('ZCARD', KEYS[index]) end
found[11] = #call('SMEMBERS', KEYS[11])
for index = 12, 15 do found[index] = call('GET', KEYS[index]) end
return found
