-- Put tasks into the retry set until they are due.
-- KEYS: 1 retry, 2 scheduled, 3 archived, 4 due (ms)
-- ARGV: 1 task key prefix, 2 due channel, then for each task: id, message, fence ("0": none), priority, lock key or "",
--       lock seconds, due (Unix seconds)
-- Returns one word for each: "parked"; or "exists" when it is anywhere else, such as pending (nothing changed).
-- Invariant: an id is in one list and has a hash; its fence marks it as a task whose row must change first. A lock
--       that another id holds stays. Forwarders are notified when one of these tasks is now the nearest.
local place = {retry = KEYS[1], scheduled = KEYS[2], archived = KEYS[3]}
local words, nearer = {}, false
for i = 3, #ARGV, 7 do
  local id, message, fence, priority, lock, seconds, due = unpack(ARGV, i, i + 6)
  local key = ARGV[1] .. id
  local state = redis.call('HEXISTS', key, 'msg') == 1 and (redis.call('HGET', key, 'state') or 'none')
  if state and not place[state] then
    words[#words + 1] = 'exists'
  else
    if state then
      redis.call('ZREM', place[state], id)
      redis.call('ZREM', KEYS[4], id)
    end
    local known = redis.call('HGET', key, 'fence') or '0'
    if tonumber(fence) > tonumber(known) then known = fence end
    redis.call('HDEL', key, 'priority', 'pending_since')
    redis.call('HSET', key, 'msg', message, 'state', 'retry', 'fence', known)
    if priority ~= '0' then redis.call('HSET', key, 'priority', priority) end
    if lock ~= '' then
      redis.call('SET', lock, id, 'NX', 'EX', seconds)
      redis.call('HSET', key, 'unique_key', lock)
    end
    redis.call('ZADD', KEYS[1], due, id)
    nearer = nearer or redis.call('ZRANGE', KEYS[1], 0, 0)[1] == id
    words[#words + 1] = 'parked'
  end
end
if nearer then redis.call('PUBLISH', ARGV[2], '1') end
return words
