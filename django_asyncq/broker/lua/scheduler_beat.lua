-- Show the entries of one scheduler to asynq's tools, until its next beat is overdue.
-- KEYS: 1 list of the scheduler's entries
-- ARGV: 1 seconds until it counts as gone, then encoded entries
-- Returns how many are shown.
-- Invariant: the list is the whole of what was given last, the last one first, as asynq writes it.
redis.call('DEL', KEYS[1])
for i = 2, #ARGV do redis.call('LPUSH', KEYS[1], ARGV[i]) end
if #ARGV > 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return #ARGV - 1
