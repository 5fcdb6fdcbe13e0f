-- Find groups that nobody takes so far, and keep the times of groups of ours to which other programs add members.
-- KEYS: 1 groups, 2 group-due, 3 group-rules
-- ARGV: 1 group key prefix, 2 how many names are looked at, at most
-- Returns for each group without rules: its name, the id of its first member, and that of any other ("": none).
-- Invariant: nothing but group-due changes. A full group of ours is ripe now. Any other is not ripe before its first
--       member has waited long enough, or no new one came: another program counts whole seconds.
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local reply = {}
for _, group in ipairs(call('SRANDMEMBER', KEYS[1], ARGV[2])) do
  local key = ARGV[1] .. group
  local count = call('ZCARD', key)
  local size, within, quiet, first = rules_of(call('HGET', KEYS[3], group))
  if count > 0 and size then
    local oldest = call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] * 1000
    local newest = call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] * 1000
    local known = call('ZSCORE', KEYS[2], group)
    local last = math.min(newest, now)
    local ripe = ripe_at(count, size, within, quiet, math.min(first or oldest, now), last)
    local is_later = known and quiet > 0 and ripe > tonumber(known) and tonumber(known) > now
    if not known or is_later or (count >= size and tonumber(known) > now + 5000) then
      call('ZADD', KEYS[2], string.format('%.0f', ripe), group)
    end
  elseif count > 0 then
    local other = count > 1 and call('ZRANGE', key, 1 + time[2] % (count - 1), 1 + time[2] % (count - 1))[1]
    reply[#reply + 1] = group
    reply[#reply + 1] = call('ZRANGE', key, 0, 0)[1] or ''
    reply[#reply + 1] = other or ''
  end
end
return reply
