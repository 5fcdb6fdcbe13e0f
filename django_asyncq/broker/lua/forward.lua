-- Move what has become due to where workers take it from.
-- KEYS: 1 scheduled or retry, 2 pending, 3 priority, 4 groups
-- ARGV: 1 task key prefix, 2 group key prefix, 3 wake channel, 4 how many at most, 5 "1" if 1 is retry
-- Returns {how many were moved, lowest score left or "", id of a task whose row must change first, …}; the lowest
--       score is that of tasks which are not in this reply
-- Invariant: an id is in one place; an id without message is dropped; tasks of ours in retry are left there.
local time = redis.call('TIME')
local now_ns = time[1] .. string.format('%06d', time[2]) .. '000'
local moved, woke, own = 0, false, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', time[1], 'LIMIT', 0, ARGV[4])) do
  local key = ARGV[1] .. id
  local known = redis.call('HMGET', key, 'fence', 'group', 'priority')
  if redis.call('HEXISTS', key, 'msg') == 0 then
    redis.call('ZREM', KEYS[1], id)
  elseif ARGV[5] == '1' and known[1] then
    own[#own + 1] = id
  else
    redis.call('ZREM', KEYS[1], id)
    moved = moved + 1
    if known[2] and known[2] ~= '' then
      redis.call('ZADD', ARGV[2] .. known[2], time[1], id)
      redis.call('SADD', KEYS[4], known[2])
      redis.call('HSET', key, 'state', 'aggregating')
    else
      redis.call('HSET', key, 'state', 'pending', 'pending_since', now_ns)
      if known[3] then
        redis.call('ZADD', KEYS[3], -tonumber(known[3]), id)
        woke = true
      else
        redis.call('LPUSH', KEYS[2], id)
      end
    end
  end
end
if woke then redis.call('PUBLISH', ARGV[3], '1') end
-- All that was looked at had the lowest scores, and of it only `own` is left.
local later = redis.call('ZRANGE', KEYS[1], #own, #own, 'WITHSCORES')
return {moved, later[2] or '', unpack(own)}
