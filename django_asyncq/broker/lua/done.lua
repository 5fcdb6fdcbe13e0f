-- Remove tasks that have succeeded, or whose row is final, and count them.
-- KEYS: 1 active, 2 lease, 3 held, 4 processed of the day, 5 processed
-- ARGV: 1 task key prefix, 2 time at which the day's counter expires, 3 largest counter, then for each task: id, fence
-- Returns one word for each: "done", "stale" (not active with this fence; nothing changed) or "missing" (no hash).
-- Invariant: a task is counted once, however often this script is called.
local words, over, count = {}, {}, 0
for i = 4, #ARGV, 2 do
  local id, fence = ARGV[i], ARGV[i + 1]
  local key = ARGV[1] .. id
  local known = redis.call('HMGET', key, 'fence', 'unique_key', 'state')
  if known[3] and ((known[1] or '0') ~= fence or known[3] ~= 'active') then
    words[#words + 1] = 'stale'
  else
    -- From the tail, where the oldest ids are: a search of the whole list would cost more than everything else.
    redis.call('LREM', KEYS[1], -1, id)
    over[#over + 1] = id
    if known[3] then
      redis.call('DEL', key)
      if known[2] and redis.call('GET', known[2]) == id then redis.call('DEL', known[2]) end
      count = count + 1
    end
    words[#words + 1] = known[3] and 'done' or 'missing'
  end
end
if #over > 0 then
  redis.call('ZREM', KEYS[2], unpack(over))
  redis.call('HDEL', KEYS[3], unpack(over))
end
if count > 0 then
  if redis.call('INCRBY', KEYS[4], count) == count then redis.call('EXPIREAT', KEYS[4], ARGV[2]) end
  local total = redis.call('GET', KEYS[5])
  if total and tonumber(total) + count >= tonumber(ARGV[3]) then
    redis.call('SET', KEYS[5], count)
  else
    redis.call('INCRBY', KEYS[5], count)
  end
end
return words
