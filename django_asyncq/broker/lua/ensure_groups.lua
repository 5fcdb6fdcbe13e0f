-- Make groups known again whose members nobody would take: another program has forgotten their names.
-- KEYS: 1 groups, 2 group-due, 3 group-rules
-- ARGV: 1 group key prefix, 2 due channel, then for each group: name, rules or "" (another program's)
-- Returns how many were not known.
-- Invariant: a group without members stays unknown; one that is in group-due keeps its time.
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local count = 0
for i = 3, #ARGV, 2 do
  local group, size, within, quiet = ARGV[i], rules_of(ARGV[i + 1])
  if size and call('EXISTS', ARGV[1] .. group) == 1 and not call('ZSCORE', KEYS[2], group) then
    count = count + 1
    local members = call('ZCARD', ARGV[1] .. group)
    local first = math.min(tonumber(call('ZRANGE', ARGV[1] .. group, 0, 0, 'WITHSCORES')[2]) * 1000, now)
    call('SADD', KEYS[1], group)
    call('HSET', KEYS[3], group, string.format('%d %d %d %.0f', size, within, quiet, first))
    call('ZADD', KEYS[2], string.format('%.0f', ripe_at(members, size, within, quiet, first, now)), group)
  elseif not size and call('EXISTS', ARGV[1] .. group) == 1 then
    count = count + call('SADD', KEYS[1], group)
  end
end
if count > 0 then call('PUBLISH', ARGV[2], '1') end
return count
