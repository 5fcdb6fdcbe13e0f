-- Build a gate from the QUEUED and RUNNING rows, before its first use or after Redis lost its memory.
-- KEYS: 1 gate (zset: task id -> expiry), 2 meta (hash), 3 retaken (hash: task id -> fence), 4 waiters (not used),
--       5 ours (set of task ids)
-- ARGV: 1 the value of meta's "changes" before the rows were read ("": none), 2 limit of the Gate row ("": no row),
--       3 its expected seconds (or ""), 4 seconds to hold a slot, 5 "1" if the gate is paused or ""; then for each task:
--       id, fence of its last finished run (0: none)
-- Returns: "built"; "already" when another process has built it, "changed" when the limit was changed since the rows
--       were read: then nothing was written.
-- Invariant: after "built", every task that was QUEUED or RUNNING in a committed row is a member, and a late release by
--       a finished run leaves its slot alone. A slot of another program stays.
local gate, meta = KEYS[1], KEYS[2]
local known = call('HMGET', meta, 'built', 'changes')
if known[1] then return 'already' end
if (known[2] or '') ~= ARGV[1] then return 'changed' end
local now = tonumber(call('TIME')[1])
local hold = tonumber(ARGV[4])
local ids = {}
call('HDEL', meta, 'limit', 'expected_seconds', 'paused')
if ARGV[2] ~= '' then call('HSET', meta, 'limit', ARGV[2], 'expected_seconds', ARGV[3]) end
if ARGV[5] ~= '' then call('HSET', meta, 'paused', ARGV[5]) end
for i = 6, #ARGV, 2 do
  call('ZADD', gate, 'GT', now + hold, ARGV[i])
  ids[#ids + 1] = ARGV[i]
  if ARGV[i + 1] ~= '0' then call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
end
note_ours(KEYS[5], ids)
expire_later(gate, hold + 60)
expire_later(KEYS[3], hold + 60)
call('HSET', meta, 'built', now, 'asked', now)
return 'built'
