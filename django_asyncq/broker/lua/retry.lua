-- Move failed tasks from active to the retry set.
-- KEYS: 1 active, 2 lease, 3 held, 4 retry, 5 processed of the day, 6 failed of the day, 7 processed, 8 failed,
--       9 minutes of the hour
-- ARGV: 1 task key prefix, 2 time at which the day's counters expire, 3 largest counter, 4 "1" to count failures,
--       5 due channel, then for each task: id, fence, message, due (Unix seconds)
-- Returns one word for each: "retried", "stale" (nothing changed) or "missing" (no hash).
-- Invariant: as in `done`; the unique lock stays. Forwarders are notified when one of these tasks is now the nearest.
--       `settled` says that the row is in agreement: what another program does later leaves another state or time.
local words, count, nearer = {}, 0, false
for i = 6, #ARGV, 4 do
  local id, fence, message, due = unpack(ARGV, i, i + 3)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state')
  if known[2] and ((known[1] or '0') ~= fence or is_elsewhere(known[2], 'active')) then
    words[#words + 1] = 'stale'
  else
    call('LREM', KEYS[1], 0, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    if known[2] then
      call('HDEL', key, 'worker', 'parked_at', 'outcome', 'outcome_waited')
      call('ZADD', KEYS[4], due, id)
      call('HSET', key, 'msg', message, 'state', 'retry', 'settled', 'retry ' .. due)
      nearer = nearer or call('ZRANGE', KEYS[4], 0, 0)[1] == id
      count = count + 1
    end
    words[#words + 1] = known[2] and 'retried' or 'missing'
  end
end
if count > 0 and ARGV[4] == '1' then
  add_to_counters({KEYS[5], KEYS[6]}, {KEYS[7], KEYS[8]}, KEYS[9], count, ARGV[2], ARGV[3])
end
if nearer then call('PUBLISH', ARGV[5], '1') end
return words
