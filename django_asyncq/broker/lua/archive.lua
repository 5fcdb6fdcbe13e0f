-- Move failed tasks from active to the archive, and trim the archive as asynq does, at most 100 a call.
-- KEYS: 1 active, 2 lease, 3 held, 4 archived, 5 processed of the day, 6 failed of the day, 7 processed, 8 failed,
--       9 minutes of the hour
-- ARGV: 1 task key prefix, 2 time at which the day's counters expire, 3 largest counter, 4 seconds an archived task is
--       kept, 5 how many are kept, then for each task: id, fence, message ("": keep the old one)
-- Returns one word for each: "archived", "stale" (nothing changed) or "missing" (no hash).
-- Invariant: as in `done` and, for `settled`, in `retry`; a trimmed task leaves no hash behind. A unique lock is released
--       with the row's key; that of a message that another program has enqueued stays, as in asynq.
local now = call('TIME')[1]
local words, count = {}, 0
for i = 6, #ARGV, 3 do
  local id, fence, message = unpack(ARGV, i, i + 2)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state', 'waited', 'unique_key', 'row')
  if known[2] and ((known[1] or '0') ~= fence or is_elsewhere(known[2], 'active')) then
    words[#words + 1] = 'stale'
  else
    call('LREM', KEYS[1], 0, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    if known[2] then
      call('HDEL', key, 'worker', 'parked_at', 'outcome', 'outcome_waited', 'waited')
      call('ZADD', KEYS[4], now, id)
      call('HSET', key, 'state', 'archived', 'settled', 'archived')
      if message ~= '' then call('HSET', key, 'msg', message) end
      announce_over(known[3], id)
      if not known[5] then release_lock(known[4], id) end
      count = count + 1
    end
    words[#words + 1] = known[2] and 'archived' or 'missing'
  end
end
if count == 0 then return words end
local old = call('ZRANGEBYSCORE', KEYS[4], '-inf', now - ARGV[4], 'LIMIT', 0, 100)
local extra = math.min(call('ZCARD', KEYS[4]) - ARGV[5], 100)
-- Both begin with the oldest, so the longer list holds the other.
if extra > #old then old = call('ZRANGE', KEYS[4], 0, extra - 1) end
for _, id in ipairs(old) do call('DEL', ARGV[1] .. id) end
if #old > 0 then call('ZREM', KEYS[4], unpack(old)) end
add_to_counters({KEYS[5], KEYS[6]}, {KEYS[7], KEYS[8]}, KEYS[9], count, ARGV[2], ARGV[3])
return words
