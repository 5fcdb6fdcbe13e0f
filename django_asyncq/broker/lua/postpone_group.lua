-- Have a group taken later, and members behind the others: those that nobody here can run, or whose rows are locked.
-- KEYS: 1 group, 2 group-due
-- ARGV: 1 group, 2 for how many ms, then ids of the members that go behind the others
-- Returns 1 if the group is one of ours that waits, else 0.
-- Invariant: no member joins or leaves. A group is never taken sooner than before.
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #ARGV do call('ZADD', KEYS[1], 'XX', time[1], ARGV[i]) end
local known = call('ZSCORE', KEYS[2], ARGV[1])
if not known then return 0 end
call('ZADD', KEYS[2], string.format('%.0f', math.max(tonumber(known), now + ARGV[2])), ARGV[1])
return 1
