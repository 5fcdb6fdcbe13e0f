-- Find which keys exist, so that an empty queue costs no script of its own.
-- KEYS: any
-- ARGV: none
-- Returns the places in KEYS, from 1, of those that exist.
-- Invariant: nothing is written.
local found = {}
for place, key in ipairs(KEYS) do
  if call('EXISTS', key) == 1 then found[#found + 1] = place end
end
return found
