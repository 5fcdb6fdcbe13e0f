-- Find the nearest retries that another program has written: it leaves no `settled`, or another time than that one's.
-- KEYS: 1 retry
-- ARGV: 1 task key prefix, 2 how many of the nearest to look at
-- Returns the ids.
-- Invariant: nothing changes.
local found = call('ZRANGE', KEYS[1], 0, ARGV[2] - 1, 'WITHSCORES')
local ids = {}
for i = 1, #found, 2 do
  if settled_of(call('HGET', ARGV[1] .. found[i], 'settled'), 'retry', found[i + 1]) == '' then ids[#ids + 1] = found[i] end
end
return ids
