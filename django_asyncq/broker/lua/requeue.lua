-- Requeue running tasks, unfinished: as the next in pending, by their priority, or as the last that must run alone.
-- KEYS: 1 active, 2 lease, 3 held, 4 pending, 5 priority, 6 suspects, 7 tokens (see `waking`), 8 fair
-- ARGV: 1 task key prefix, 2 "1" to raise the fence, 3 "" or the digest of the names that this worker knows, when it
--       does not know these tasks, 4 for how many seconds it leaves them to others, 5 how holders begin (see `hold`),
--       then for each task:
--       id, fence, "1" if it must run alone; the last one given is the next to run
-- Returns one word for each: "requeued", "stale" (nothing changed) or "missing" (no hash).
-- Invariant: after the fence is raised, nothing that the former holder reports is accepted.
local time = call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local places = {pending = KEYS[4], priority = KEYS[5], fair = KEYS[8]}
local words, pushed = {}, 0
for i = 6, #ARGV, 3 do
  local id, fence, is_suspect = ARGV[i], ARGV[i + 1], ARGV[i + 2] == '1'
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state', 'priority', 'fair', 'worker')
  if known[2] and ((known[1] or '0') ~= fence or is_elsewhere(known[2], 'active')) then
    words[#words + 1] = 'stale'
  else
    call('LREM', KEYS[1], 0, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    if known[2] then
      call('HDEL', key, 'worker')
      call('HSET', key, 'state', 'pending')
      if ARGV[2] == '1' then call('HSET', key, 'fence', (fence_of(fence) or 0) + 1) end
      if ARGV[3] ~= '' then
        -- The time for which nobody knows it begins anew when the last worker that does is gone.
        call('HDEL', key, 'parked_at')
        local left = call('HGET', key, 'left_until') or ''
        local till = whole(string.match(left, '^(%d+) ')) or 0
        local is_left = till > tonumber(time[1]) and till <= time[1] + ARGV[4]
        call('HSET', key, 'left_until', (is_left and left or string.format('%d', time[1] + ARGV[4])) .. ' ' .. ARGV[3])
      end
      if is_suspect then
        call('HSET', key, 'suspect', 1)
        call('ZADD', KEYS[6], now_ms, id)
      else
        -- Many may be left to others: as the next they would all stand before those of other keys.
        local is_new = ARGV[3] ~= '' and fair_of(known[4])
        local was_held = string.sub(known[5] or '', 1, #ARGV[5]) == ARGV[5]
        enter_line(places, key, id, known[3], known[4], not is_new and (was_held and 'back' or 'next') or nil)
      end
      if not is_suspect then pushed = pushed + 1 end
    end
    words[#words + 1] = known[2] and 'requeued' or 'missing'
  end
end
wake(KEYS[7], pushed)
return words
