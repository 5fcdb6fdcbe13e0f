-- Build a gate from the QUEUED and RUNNING rows, before its first use or after Redis lost its memory.
-- KEYS: 1 gate (zset: task id -> expiry), 2 meta (hash), 3 retaken (hash: task id -> fence)
-- ARGV: 1 the value of meta's "changes" before the rows were read ("": none), 2 limit of the Gate row ("": no row),
--       3 its expected seconds (or ""), 4 seconds to hold a slot; then for each task: id, fence of its last finished
--       run (0: none)
-- Returns: "built"; "already" when another process has built it, "changed" when the limit was changed since the rows
--       were read: then nothing was written.
-- Invariant: after "built", every task that was QUEUED or RUNNING in a committed row is a member, and a late release by
--       a finished run leaves its slot alone.
local gate, meta = KEYS[1], KEYS[2]
local known = call('HMGET', meta, 'built', 'changes')
if known[1] then return 'already' end
if (known[2] or '') ~= ARGV[1] then return 'changed' end
local now = tonumber(call('TIME')[1])
local hold = tonumber(ARGV[4])
call('HDEL', meta, 'limit', 'expected_seconds')
if ARGV[2] ~= '' then call('HSET', meta, 'limit', ARGV[2], 'expected_seconds', ARGV[3]) end
for i = 5, #ARGV, 2 do
  call('ZADD', gate, 'GT', now + hold, ARGV[i])
  if ARGV[i + 1] ~= '0' then call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
end
for _, key in ipairs({gate, KEYS[3]}) do
  local ttl = call('TTL', key)
  if ttl ~= -2 and ttl < hold + 60 then call('EXPIRE', key, hold + 60) end
end
call('HSET', meta, 'built', now, 'asked', now)
return 'built'
