-- Take the members of one ripe group that run together: at most as many as its rules say, those that joined first.
-- KEYS: 1 group-due, 2 group-rules, 3 groups, 4 aggregation sets
-- ARGV: 1 group key prefix, 2 new id of a set, 3 seconds after which a set that nobody has dropped goes back,
--       4 task key prefix
-- Returns {group, id, …}; {"", ms until the nearest group is ripe, or ""} when none is ripe.
-- Invariant: a taken member is in a set that the aggregation sets name, with its old score. A group with members left is
--       in group-due. A group without any is named nowhere; its rules stay until its set is dropped.
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _ = 1, 100 do
  local nearest = call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  if not nearest[1] or tonumber(nearest[2]) > now then
    return {'', nearest[1] and string.format('%.0f', math.min(nearest[2] - now, LARGEST)) or ''}
  end
  local group, key = nearest[1], ARGV[1] .. nearest[1]
  local size, within, quiet = rules_of(call('HGET', KEYS[2], group))
  local found = call('ZRANGE', key, 0, math.min(size or 1, 1000) - 1, 'WITHSCORES')
  local reply, scores = {group}, {}
  for i = 1, #found, 2 do
    -- An id without a message is no task.
    if call('HEXISTS', ARGV[4] .. found[i], 'msg') == 1 then
      reply[#reply + 1] = found[i]
      scores[#scores + 1] = found[i + 1]
      scores[#scores + 1] = found[i]
    end
  end
  local set = key .. ':' .. ARGV[2]
  if #scores > 0 then
    call('ZADD', set, unpack(scores))
    call('ZADD', KEYS[4], time[1] + ARGV[3], set)
  end
  if #found > 0 then call('ZREMRANGEBYRANK', key, 0, #found / 2 - 1) end
  local left, oldest = call('ZCARD', key), call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  if left == 0 then
    call('SREM', KEYS[3], group)
    call('ZREM', KEYS[1], group)
    if #scores == 0 then call('HDEL', KEYS[2], group) end
  elseif size then
    local first = math.min(tonumber(oldest) * 1000, now)
    call('HSET', KEYS[2], group, string.format('%d %d %d %.0f', size, within, quiet, first))
    call('ZADD', KEYS[1], string.format('%.0f', ripe_at(left, size, within, quiet, first, now)), group)
  end
  if #scores > 0 then return reply end
end
return {'', '0'}
