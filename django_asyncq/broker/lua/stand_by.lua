-- Note that a worker has read what it was handed from a queue, and whether it may be handed a task again.
-- KEYS: 1 standby of the worker: "" → "" while it may be handed one; queue → id of what it was handed and has not read
-- ARGV: 1 queue, 2 "1" when it may be handed one, else "", 3 seconds after which all this is forgotten
-- Returns 1. Invariant: what it has not read from other queues stays noted.
redis.call('HDEL', KEYS[1], ARGV[1])
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], '')
else
  redis.call('HSET', KEYS[1], '', '')
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
return 1
