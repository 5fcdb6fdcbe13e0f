-- Postpone tasks that cannot run here now: move them from active to scheduled.
-- KEYS: 1 active, 2 lease, 3 held, 4 scheduled, 5 due (ms), 6 unknown
-- ARGV: 1 task key prefix, 2 delay in seconds, 3 due channel, then for each task: id, fence, label: under which it waits
--       for code that has it, or "", when it is due in Unix ms, or "" for the delay
-- Returns for each the seconds since it was first put aside for want of code, 0 when it was not before; -1 when it is stale (nothing changed) or missing.
-- Invariant: an id is in one list. Forwarders are notified when one of these tasks is now the nearest.
local now = tonumber(call('TIME')[1])
local ages, nearer = {}, false
for i = 4, #ARGV, 4 do
  local id, fence, label, due_ms = unpack(ARGV, i, i + 3)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state', 'parked_at')
  local since = past(known[3], now)
  -- Nobody waits for a year: the time is not one that this script wrote.
  since = since and since > now - 31536000 and since
  if known[2] and ((known[1] or '0') ~= fence or is_elsewhere(known[2], 'active')) then
    ages[#ages + 1] = -1
  else
    call('LREM', KEYS[1], 0, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    if known[2] then
      call('HDEL', key, 'worker')
      call('HSET', key, 'state', 'scheduled')
      if due_ms == '' then
        call('ZREM', KEYS[5], id)
        call('ZADD', KEYS[4], now + ARGV[2], id)
      else
        call('ZADD', KEYS[4], math.ceil(due_ms / 1000), id)
        call('ZADD', KEYS[5], due_ms, id)
      end
      if label ~= '' then
        if not since then call('HSET', key, 'parked_at', now) end
        call('ZADD', KEYS[6], 0, label .. '\n' .. id)
      end
      nearer = nearer or call('ZRANGE', due_ms == '' and KEYS[4] or KEYS[5], 0, 0)[1] == id
    end
    ages[#ages + 1] = known[2] and now - (since or now) or -1
  end
end
if nearer then call('PUBLISH', ARGV[3], '1') end
return ages
