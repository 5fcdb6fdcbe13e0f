-- Move tasks of other programs that have succeeded here to completed, as their messages ask, and count them.
-- KEYS: 1 active, 2 lease, 3 held, 4 completed, 5 processed of the day, 6 processed,
--       7 minutes of the hour
-- ARGV: 1 task key prefix, 2 time at which the day's counter expires, 3 largest counter, then for each task: id, fence,
--       message, seconds for which it is kept, result ("": none)
-- Returns one word for each: "completed", "stale" (not active with this fence; nothing changed) or "missing" (no hash).
-- Invariant: as in `done`; the unique lock is released when this task holds it.
local now = call('TIME')[1]
local words, count = {}, 0
for i = 4, #ARGV, 5 do
  local id, fence, message, seconds, result = unpack(ARGV, i, i + 4)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'unique_key', 'state', 'waited')
  if known[3] and ((known[1] or '0') ~= fence or is_elsewhere(known[3], 'active')) then
    words[#words + 1] = 'stale'
  else
    call('LREM', KEYS[1], -1, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    if known[3] then
      call('HDEL', key, 'worker', 'parked_at', 'parked_retried', 'outcome', 'outcome_waited', 'waited', 'fence')
      call('ZADD', KEYS[4], now + seconds, id)
      call('HSET', key, 'msg', message, 'state', 'completed')
      if result ~= '' then call('HSET', key, 'result', result) end
      release_lock(known[2], id)
      announce_over(known[4], id)
      count = count + 1
    end
    words[#words + 1] = known[3] and 'completed' or 'missing'
  end
end
if count > 0 then add_to_counters({KEYS[5]}, {KEYS[6]}, KEYS[7], count, ARGV[2], ARGV[3]) end
return words
