-- List the entries of one scheduler for asynq's tools, until its next heartbeat is overdue.
-- KEYS: 1 list of the scheduler's entries
-- ARGV: 1 seconds until they expire, then encoded entries
-- Returns how many are listed.
-- Invariant: the list holds exactly the entries given last, in reverse order, as asynq writes it.
call('DEL', KEYS[1])
for i = 2, #ARGV do call('LPUSH', KEYS[1], ARGV[i]) end
if #ARGV > 1 then call('EXPIRE', KEYS[1], ARGV[1]) end
return #ARGV - 1
