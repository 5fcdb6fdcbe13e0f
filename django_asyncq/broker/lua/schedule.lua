-- Put new tasks into the scheduled set, until they are due.
-- KEYS: 1 scheduled
-- ARGV: 1 task key prefix, then for each task: id, message, fence ("0": none), priority, lock key or "",
--       lock seconds, due (Unix seconds)
-- Returns one word for each: "scheduled", "exists" (nothing changed), "duplicate" (another id holds the lock; nothing
--       changed).
-- Invariant: an id that is anywhere stays there. No lock is taken for a task that is refused.
local words = {}
for i = 2, #ARGV, 7 do
  local id, message, fence, priority, lock, seconds, due = unpack(ARGV, i, i + 6)
  local key = ARGV[1] .. id
  local owner = lock ~= '' and redis.call('GET', lock)
  if owner and owner ~= id then
    words[#words + 1] = 'duplicate'
  elseif redis.call('HEXISTS', key, 'msg') == 1 then
    words[#words + 1] = 'exists'
  else
    redis.call('HSET', key, 'msg', message, 'state', 'scheduled')
    if lock ~= '' then
      redis.call('SET', lock, id, 'EX', seconds)
      redis.call('HSET', key, 'unique_key', lock)
    end
    if fence ~= '0' then redis.call('HSET', key, 'fence', fence) end
    if priority ~= '0' then redis.call('HSET', key, 'priority', priority) end
    redis.call('ZADD', KEYS[1], due, id)
    words[#words + 1] = 'scheduled'
  end
end
return words
