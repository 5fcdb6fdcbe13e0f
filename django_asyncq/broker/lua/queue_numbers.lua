-- Read how much Redis holds of queues, for people and monitors.
-- KEYS: 15 for each queue. 1-4 lists: pending, active, inbox, rejected; 5-10 zsets: priority, suspects, scheduled,
--       retry, archived, completed; 11 the set of groups; 12-15 strings: paused, processed, and processed and failed of
--       the day
-- ARGV: none
-- Returns for each queue the length of each of its first eleven, then the strings; false for none
-- Invariant: nothing is written.
local queues = {}
for before = 0, #KEYS - 1, 15 do
    local found = {}
    for index = 1, 4 do found[index] = call('LLEN', KEYS[before + index]) end
    for index = 5, 10 do found[index] = call('ZCARD', KEYS[before + index]) end
    found[11] = #call('SMEMBERS', KEYS[before + 11])
    for index = 12, 15 do found[index] = call('GET', KEYS[before + index]) end
    queues[#queues + 1] = found
end
return queues
