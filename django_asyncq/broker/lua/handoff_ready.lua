-- Record that a worker has read the task it was handed from a queue, and whether it is ready for another.
-- KEYS: 1 handoff of the worker: "" → "" while it is ready; queue → id of the task that it has not read yet
-- ARGV: 1 queue, "" for none, 2 "1" if the worker is ready, else "", 3 seconds until all this is forgotten
-- Returns 1. Invariant: what the worker has not read from other queues stays recorded.
call('HDEL', KEYS[1], ARGV[1])
if ARGV[2] == '' then
  call('HDEL', KEYS[1], '')
else
  call('HSET', KEYS[1], '', '')
  call('EXPIRE', KEYS[1], ARGV[3])
end
return 1
