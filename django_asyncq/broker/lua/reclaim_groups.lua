-- Restore the members of sets to their groups that were taken, and not dropped by their deadline.
-- KEYS: 1 aggregation sets, 2 groups, 3 group-due, 4 group-rules
-- ARGV: 1 group key prefix
-- Returns how many members went back.
-- Invariant: each keeps its score. The group is named in the groups set again, which asynq's own recoverer forgets; one
--       of ours is ripe when it would have been. What is no set of this queue is only taken out of the aggregation sets.
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local count = 0
for _, set in ipairs(call('ZRANGEBYSCORE', KEYS[1], '-inf', time[1], 'LIMIT', 0, 20)) do
  local is_own = string.sub(set, 1, #ARGV[1]) == ARGV[1]
  local group = is_own and string.match(string.sub(set, #ARGV[1] + 1), '^(.+):[^:]*$')
  local found = group and call('ZRANGE', set, 0, 999, 'WITHSCORES') or {}
  while #found > 0 do
    local scores = {}
    for i = 1, #found, 2 do
      scores[#scores + 1] = found[i + 1]
      scores[#scores + 1] = found[i]
    end
    call('ZADD', ARGV[1] .. group, unpack(scores))
    call('ZREMRANGEBYRANK', set, 0, #scores / 2 - 1)
    count = count + #scores / 2
    found = call('ZRANGE', set, 0, 999, 'WITHSCORES')
  end
  if group and call('EXISTS', ARGV[1] .. group) == 1 then
    call('SADD', KEYS[2], group)
    local size, within, quiet, first = rules_of(call('HGET', KEYS[4], group))
    if size then
      local ripe = ripe_at(call('ZCARD', ARGV[1] .. group), size, within, quiet, first or now, now)
      call('ZADD', KEYS[3], string.format('%.0f', ripe), group)
    end
  end
  call('ZREM', KEYS[1], set)
end
return count
