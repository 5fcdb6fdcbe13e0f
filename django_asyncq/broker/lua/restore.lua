-- Restore tasks of other programs that cannot run here, for their own workers; archive those that nobody took for long.
-- KEYS: 1 active, 2 lease, 3 held, 4 retry, 5 scheduled, 6 archived, 7 due (ms)
-- ARGV: 1 task key prefix, 2 delay in seconds, 3 due channel, 4 seconds after which a task is archived, 5 seconds for
--       which our workers pass over it when it is due; for each task: id, fence of the caller's lease ("": it waits in retry), how often it was retried, the error with which it
--       is archived, as a field of the message ("": it never is)
-- Returns one word for each: "restored", "archived", "stale" (nothing changed) or "missing" (no hash).
-- Invariant: nothing is deleted. No field of ours stays, except `row`, until when it is left to others, and since when
--       nobody could run it, which begins anew when another program has run it. Forwarders are notified when one of these
--       tasks is now the nearest.
local now = tonumber(call('TIME')[1])
local words, nearer = {}, false

local function age_of(key, retried)
  local known = call('HMGET', key, 'parked_at', 'parked_retried')
  local since = known[2] == retried and past(known[1], now)
  -- Nobody waits for a year: the time is not one that this script wrote.
  if since and since > now - 31536000 then return now - since end
  call('HSET', key, 'parked_at', now, 'parked_retried', retried)
  return 0
end

for i = 6, #ARGV, 4 do
  local id, fence, retried, error_field = unpack(ARGV, i, i + 3)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state', 'msg')
  local is_stale = fence ~= '' and (known[1] or '0') ~= fence
  if known[3] and (is_stale or is_elsewhere(known[2], fence == '' and 'retry' or 'active')) then
    words[#words + 1] = 'stale'
  else
    call('LREM', KEYS[1], 0, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    call('ZREM', KEYS[4], id)
    local is_over = known[3] and error_field ~= '' and age_of(key, retried) >= tonumber(ARGV[4])
    if known[3] then
      call('HDEL', key, 'fence', 'worker', 'cancel', 'outcome', 'outcome_waited', 'suspect', 'waited', 'progress')
      call('ZREM', KEYS[7], id)
    end
    if is_over then
      call('ZADD', KEYS[6], now, id)
      call('HSET', key, 'state', 'archived', 'msg', known[3] .. error_field)
    elseif known[3] then
      call('ZADD', KEYS[5], now + ARGV[2], id)
      call('HSET', key, 'state', 'scheduled')
      if ARGV[5] ~= '0' then call('HSET', key, 'left_until', now + ARGV[2] + ARGV[5]) end
      nearer = nearer or call('ZRANGE', KEYS[5], 0, 0)[1] == id
    end
    words[#words + 1] = not known[3] and 'missing' or is_over and 'archived' or 'restored'
  end
end
if nearer then call('PUBLISH', ARGV[3], '1') end
return words
