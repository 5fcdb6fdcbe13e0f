-- Give a lease to tasks that our workers run and that have none: its key was evicted, or a tool removed it.
-- KEYS: 1 active, 2 lease
-- ARGV: 1 task key prefix, 2 held key prefix, 3 lease seconds, then task ids
-- Returns how many leases were granted. The supervisor of a live worker renews it; else it expires and is recovered.
-- Invariant: no existing lease changes, and no fence. A task of a Go worker (no fence) is left to asynq's recoverer.
local lease_end = call('TIME')[1] + ARGV[3]
local granted = 0
for i = 4, #ARGV do
  local id = ARGV[i]
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'fence', 'worker')
  local ours = known[1] == 'active' and known[2] and call('HEXISTS', key, 'msg') == 1
  if ours and not call('ZSCORE', KEYS[2], id) then
    if not call('LPOS', KEYS[1], id) then call('LPUSH', KEYS[1], id) end
    call('ZADD', KEYS[2], lease_end, id)
    if known[3] then call('HSET', ARGV[2] .. known[3], id, known[2]) end
    granted = granted + 1
  end
end
return granted
