-- Remove tasks that have succeeded, or whose row is final, and count them.
-- KEYS: 1 active, 2 lease, 3 held, 4 processed of the day, 5 processed, 6 minutes of the hour
-- ARGV: 1 task key prefix, 2 time at which the day's counter expires, 3 largest counter, then for each task: id, fence
-- Returns one word for each: "done", "stale" (not active with this fence; nothing changed) or "missing" (no hash).
-- Invariant: a task is counted once, however often this script is called.
local words, over, count = {}, {}, 0
for i = 4, #ARGV, 2 do
  local id, fence = ARGV[i], ARGV[i + 1]
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'unique_key', 'state', 'waited')
  if known[3] and ((known[1] or '0') ~= fence or is_elsewhere(known[3], 'active')) then
    words[#words + 1] = 'stale'
  else
    -- From the tail, where the oldest ids are: a search of the whole list would cost more than everything else.
    call('LREM', KEYS[1], -1, id)
    over[#over + 1] = id
    if known[3] then
      call('DEL', key)
      release_lock(known[2], id)
      announce_over(known[4], id)
      count = count + 1
    end
    words[#words + 1] = known[3] and 'done' or 'missing'
  end
end
if #over > 0 then
  call('ZREM', KEYS[2], unpack(over))
  call('HDEL', KEYS[3], unpack(over))
end
if count > 0 then add_to_counters({KEYS[4]}, {KEYS[5]}, KEYS[6], count, ARGV[2], ARGV[3]) end
return words
