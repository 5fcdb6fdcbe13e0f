-- Have scheduled tasks come due one after the other, from a time on.
-- KEYS: 1 scheduled, 2 due (ms)
-- ARGV: 1 task key prefix, 2 due channel, 3 when the turn of the first is, Unix µs, 4 µs between two, 5 by how many µs
--       each is due before its turn, then ids in their order
-- Returns for each: when its turn is now, Unix µs, or "" if it is not scheduled: then nothing was changed.
-- Invariant: an id stays in the list in which it is. Forwarders are notified.
local at, answer, moved = tonumber(ARGV[3]), {}, false
for i = 6, #ARGV do
  local id = ARGV[i]
  local is_here = call('HGET', ARGV[1] .. id, 'state') == 'scheduled' and call('ZSCORE', KEYS[1], id)
  if is_here then
    call('ZADD', KEYS[1], string.format('%.0f', math.ceil((at - ARGV[5]) / 1000000)), id)
    call('ZADD', KEYS[2], string.format('%.0f', math.ceil((at - ARGV[5]) / 1000)), id)
    answer[#answer + 1] = string.format('%.0f', at)
    at, moved = at + ARGV[4], true
  else
    answer[#answer + 1] = ''
  end
end
if moved then call('PUBLISH', ARGV[2], '1') end
return answer
