-- Read the counters of some hours, as `done`, `retry` and `archive` write them.
-- KEYS: the hashes of the hours
-- ARGV: none
-- Returns a list for each: field, value, field, value, …
-- Invariant: nothing is written.
local hours = {}
for _, key in ipairs(KEYS) do hours[#hours + 1] = call('HGETALL', key) end
return hours
