-- Move due tasks to where workers dequeue them.
-- KEYS: 1 scheduled or retry, 2 pending, 3 priority, 4 groups, 5 due (ms; read for scheduled only), 6 group-due,
--       7 group-rules, 8 tokens (see `waking`), 9 fair
-- ARGV: 1 task key prefix, 2 group key prefix, 3 how many of each kind at most, 4 "1" if the first key is retry
-- Returns {how many were moved, ms until the nearest task that is left or "", id of one of our retries that is due, …}.
--       The row of a retry must change before it moves; the nearest task is not one of those in this reply.
-- Invariant: an id is in one list; an id without a message is removed; our own tasks in retry stay there.
local time = call('TIME')
local now_ns = time[1] .. ('00000' .. time[2]):sub(-6) .. '000'
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local places = {pending = KEYS[2], priority = KEYS[3], fair = KEYS[9]}
local groups = {groups = KEYS[4], due = KEYS[6], rules = KEYS[7]}
local moved, pushed, own = 0, 0, {}
local ids = call('ZRANGEBYSCORE', KEYS[1], '-inf', time[1], 'LIMIT', 0, ARGV[3])
if ARGV[4] ~= '1' then
  for _, id in ipairs(call('ZRANGEBYSCORE', KEYS[5], '-inf', now_ms, 'LIMIT', 0, ARGV[3])) do
    local second = call('ZSCORE', KEYS[1], id)
    if not second then call('ZREM', KEYS[5], id) end
    if second and tonumber(second) > tonumber(time[1]) then ids[#ids + 1] = id end
  end
end
for _, id in ipairs(ids) do
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'group', 'priority', 'rules', 'fair')
  if ARGV[4] == '1' and known[1] and call('HEXISTS', key, 'msg') == 1 then
    own[#own + 1] = id
  else
    call('ZREM', KEYS[1], id)
    if ARGV[4] ~= '1' then call('ZREM', KEYS[5], id) end
    if call('HEXISTS', key, 'msg') == 1 then
      moved = moved + 1
      if known[2] and known[2] ~= '' then
        join_group(groups, ARGV[2], known[2], id, known[4] or '', time)
        call('HSET', key, 'state', 'aggregating')
      else
        call('HSET', key, 'state', 'pending', 'pending_since', now_ns)
        enter_line(places, key, id, known[3], known[5])
        pushed = pushed + 1
      end
    end
  end
end
wake(KEYS[8], pushed)
-- The tasks above had the lowest scores; of them only `own` is left in the set.
local later = call('ZRANGE', KEYS[1], #own, #own, 'WITHSCORES')[2]
local sooner = ARGV[4] ~= '1' and call('ZRANGE', KEYS[5], 0, 0, 'WITHSCORES')[2]
local nearest = math.min(later and later * 1000 or math.huge, sooner and tonumber(sooner) or math.huge)
-- A time that no clock shows is none.
if math.abs(nearest) > LARGEST then return {moved, '', unpack(own)} end
return {moved, string.format('%.0f', nearest - now_ms), unpack(own)}
