-- Make tasks pending.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 completed, 7 due (ms)
-- ARGV: 1 task key prefix, 2 wake channel, 3 "again" or "", then for each task:
--       id, message, fence ("0": none), priority, lock key or "", lock seconds
-- Returns one word for each: "queued", "exists" (nothing changed), "duplicate" (another id holds the lock; nothing
--       changed).
-- Invariant: an id is in one place; with "again" it leaves retry, archived, completed or scheduled for pending, and its
-- fence never falls. No lock is taken for a task that is refused.
local time = redis.call('TIME')
local now_ns = time[1] .. string.format('%06d', time[2]) .. '000'
local place = {scheduled = KEYS[3], retry = KEYS[4], archived = KEYS[5], completed = KEYS[6]}
local words, woke = {}, false
for i = 4, #ARGV, 6 do
  local id, message, fence, priority, lock, seconds = unpack(ARGV, i, i + 5)
  local key = ARGV[1] .. id
  local state = redis.call('HEXISTS', key, 'msg') == 1 and (redis.call('HGET', key, 'state') or 'none')
  local free = not state or (ARGV[3] == 'again' and place[state])
  local owner = lock ~= '' and redis.call('GET', lock)
  if owner and owner ~= id then
    words[#words + 1] = 'duplicate'
  elseif not free then
    words[#words + 1] = 'exists'
  else
    if state then
      redis.call('ZREM', place[state], id)
      redis.call('ZREM', KEYS[7], id)
      redis.call('HDEL', key, 'priority', 'parked_at', 'worker', 'outcome')
    end
    redis.call('HSET', key, 'msg', message, 'state', 'pending', 'pending_since', now_ns)
    if lock ~= '' then
      redis.call('SET', lock, id, 'EX', seconds)
      redis.call('HSET', key, 'unique_key', lock)
    end
    if fence ~= '0' and tonumber(fence) > tonumber(redis.call('HGET', key, 'fence') or 0) then
      redis.call('HSET', key, 'fence', fence)
    end
    if priority == '0' then
      redis.call('LPUSH', KEYS[1], id)
    else
      redis.call('HSET', key, 'priority', priority)
      redis.call('ZADD', KEYS[2], -tonumber(priority), id)
      woke = true
    end
    words[#words + 1] = 'queued'
  end
end
if woke then redis.call('PUBLISH', ARGV[2], '1') end
return words
