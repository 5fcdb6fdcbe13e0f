-- Show worker processes to asynq's tools until their next heartbeat is overdue.
-- KEYS: with "all" first 1 servers, 2 workers, 3 requests to drain; then for each process: its server, what it runs,
--       what it says of itself
-- ARGV: 1 seconds until they expire, 2 "all" or "" (in a cluster: the first three are in other slots); then for each
--       process: its description, what it says of itself, number of running tasks, then id and description of each
-- Returns the requests to drain, flat: worker or host, until when.
-- Invariant: what a process runs is exactly what was given last. Processes whose time is over are no longer listed.
local now = tonumber(call('TIME')[1])
local is_all, at = ARGV[2] == 'all', 3
for i = is_all and 4 or 1, #KEYS, 3 do
  local last = at + 2 + 2 * ARGV[at + 2]
  call('SET', KEYS[i], ARGV[at], 'EX', ARGV[1])
  call('SET', KEYS[i + 2], ARGV[at + 1], 'EX', ARGV[1])
  call('DEL', KEYS[i + 1])
  for each = at + 3, last, 2 do call('HSET', KEYS[i + 1], ARGV[each], ARGV[each + 1]) end
  call('EXPIRE', KEYS[i + 1], ARGV[1])
  for place = is_all and 1 or 3, 2 do call('ZADD', KEYS[place], now + ARGV[1], KEYS[i + place - 1]) end
  at = last + 1
end
if not is_all then return {} end
for place = 1, 2 do call('ZREMRANGEBYSCORE', KEYS[place], '-inf', now - 1) end
return call('HGETALL', KEYS[3])
