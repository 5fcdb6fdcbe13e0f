-- Put tasks into the retry set, to be looked at again when due.
-- KEYS: 1 retry, 2 scheduled, 3 archived
-- ARGV: 1 task key prefix, then for each task: id, message, fence ("0": none), priority, due (Unix seconds)
-- Returns one word for each: "parked", or "exists" for one that is pending or active (nothing changed).
-- Invariant: an id is in one place, and its hash is there; `fence` marks it as one whose row must change first.
local place = {retry = KEYS[1], scheduled = KEYS[2], archived = KEYS[3]}
local words = {}
for i = 2, #ARGV, 5 do
  local id, message, fence, priority, due = unpack(ARGV, i, i + 4)
  local key = ARGV[1] .. id
  local state = redis.call('HGET', key, 'state')
  if state and not place[state] then
    words[#words + 1] = 'exists'
  else
    if state and state ~= 'retry' then redis.call('ZREM', place[state], id) end
    local known = tonumber(redis.call('HGET', key, 'fence') or 0)
    redis.call('HSET', key, 'msg', message, 'state', 'retry', 'fence', string.format('%.0f', math.max(known, tonumber(fence))))
    if priority ~= '0' then redis.call('HSET', key, 'priority', priority) end
    redis.call('ZADD', KEYS[1], due, id)
    words[#words + 1] = 'parked'
  end
end
return words
