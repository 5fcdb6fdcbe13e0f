-- Add new tasks to a group.
-- KEYS: 1 group zset, 2 groups set
-- ARGV: 1 task key prefix, 2 group name, then for each task: id, message, fence ("0": none), priority, lock key or "",
--       lock seconds
-- Returns one word for each: "grouped"; or, with nothing changed, "exists" or "duplicate" (another id holds the lock).
-- Invariant: a group with members is named in the groups set. As in asynq, the hash has no unique_key field.
local now = call('TIME')[1]
local words = {}
for i = 3, #ARGV, 6 do
  local id, message, fence, priority, lock, seconds = unpack(ARGV, i, i + 5)
  local key = ARGV[1] .. id
  local owner = lock ~= '' and call('GET', lock)
  if owner and owner ~= id then
    words[#words + 1] = 'duplicate'
  elseif call('HEXISTS', key, 'msg') == 1 then
    words[#words + 1] = 'exists'
  else
    if lock ~= '' then call('SET', lock, id, 'EX', seconds) end
    call('HSET', key, 'msg', message, 'state', 'aggregating', 'group', ARGV[2])
    if fence ~= '0' then call('HSET', key, 'fence', fence) end
    if priority ~= '0' then call('HSET', key, 'priority', priority) end
    call('ZADD', KEYS[1], now, id)
    call('SADD', KEYS[2], ARGV[2])
    words[#words + 1] = 'grouped'
  end
end
return words
