-- Add one firing of a schedule to its history, for asynq's tools.
-- KEYS: 1 zset of the entry's events
-- ARGV: 1 Unix seconds, 2 encoded event, 3 how many are kept
-- Returns how many there are now.
-- Invariant: a repeated call changes nothing; the oldest events are removed first.
call('ZREMRANGEBYRANK', KEYS[1], 0, -tonumber(ARGV[3]))
call('ZADD', KEYS[1], ARGV[1], ARGV[2])
return call('ZCARD', KEYS[1])
