-- Read how much Redis holds of a queue, for people and monitors.
-- KEYS: 1-4 lists: pending, active, inbox, rejected; 5-10 zsets: priority, suspects, scheduled, retry, archived,
--       completed; 11 the set of groups; 12-15 strings: paused, processed, and processed and failed of the day
-- ARGV: 1 task key prefix, 2 group key prefix
-- Returns the length of each of the first eleven, then the strings; false for none. Then how many wait in its groups,
--       and since when the entry waits that has waited longest in pending (Unix ns); false for none
-- Invariant: nothing is written.
local MOST_GROUPS = 1000
local found = {}
for index = 1, 4 do found[index] = call('LLEN', KEYS[index]) end
for index = 5, 10 do found[index] = call('ZCARD', KEYS[index]) end
local groups, members = call('SMEMBERS', KEYS[11]), 0
found[11] = #groups
for index = 12, 15 do found[index] = call('GET', KEYS[index]) end
for index = 1, math.min(#groups, MOST_GROUPS) do members = members + call('ZCARD', ARGV[2] .. groups[index]) end
found[16] = members
local oldest = call('LRANGE', KEYS[1], -1, -1)[1]
found[17] = oldest and call('HGET', ARGV[1] .. oldest, 'pending_since') or false
return found
