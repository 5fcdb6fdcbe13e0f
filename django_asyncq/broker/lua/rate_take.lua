-- Ask a rate which tasks may start: at the claim only for their place, at the start for a start itself.
-- KEYS: 1 rate (hash: built, interval and burst if a row has them, until, again, refused), 2 looks (zset: task -> when
--       it is looked at next, Unix µs)
-- ARGV: 1 "claim", or "start" (each that may start takes its start), 2 interval in µs if the rate has none, 3 burst if
--       it has none, then tasks, in the order in which they shall start
-- Returns {"unbuilt"} (build it, ask again), or {now in Unix µs, the interval that counts in µs, for each task: "" (it may
--       start) or when it is looked at next, Unix µs}.
-- Invariant: in any window there are at most window / interval + burst starts: `until` is an interval after the latest
--       start, or after the `until` before, and at most `burst` intervals ahead. What waits is looked at one interval
--       after the one before: at most one that comes for the first time, and one that came in vain. The work does not
--       grow with what waits.
local KEPT_US, LATEST_US = 3600000000, 253402300799000000
local rate, looks = KEYS[1], KEYS[2]
local known = call('HMGET', rate, 'built', 'interval', 'burst', 'until', 'again', 'refused')
if not known[1] then return {'unbuilt'} end
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, burst = whole(known[2]), whole(known[3])
if not (interval and burst and interval > 0 and burst > 0) then
  interval, burst = tonumber(ARGV[2]), tonumber(ARGV[3])
end
-- Later than a full burst it is of the numbers before an edit: such a burst counts from now.
local latest = now + burst * interval
local noted = whole(known[4]) or 0
local till = math.min(math.max(noted, now), latest)

-- One that nobody has asked about for so long was cancelled, or no longer waits for another reason.
call('ZREMRANGEBYSCORE', looks, '-inf', now - KEPT_US)
local last = tonumber(call('ZRANGE', looks, -1, -1, 'WITHSCORES')[2] or '')
last = last and last < LATEST_US and last
-- The next free look behind all others; none when nobody has one to come.
local look = last and last > now and last + interval
local again = whole(known[5]) or 0
if again > (look or now) + interval then again = 0 end

local members = {}
for i = 4, #ARGV do members[#members + 1] = ARGV[i] end
local scores = call('ZMSCORE', looks, unpack(members))
local answer, placed, gone = {string.format('%.0f', now), string.format('%.0f', interval)}, {}, {}
local is_new = noted > latest
for n, member in ipairs(members) do
  local comes_again = scores[n] or ARGV[1] == 'start'
  local next_at = till + interval - latest + now
  local at
  if next_at <= now and (comes_again or not look) then
    till = till + interval
    if ARGV[1] == 'start' then
      is_new, gone[#gone + 1] = true, member
    end
  elseif ARGV[1] == 'start' then
    -- Its turn has come, and the start before was late: were it sent behind the others, nobody would take the next one.
    at = next_at
  elseif comes_again then
    at = math.max(next_at, again)
    again = at + interval
  else
    at = look or next_at
    look = at + interval
  end
  if at then
    at = math.min(at, LATEST_US)
    placed[#placed + 1], placed[#placed + 2] = string.format('%.0f', at), member
    last = math.max(last or 0, at)
  end
  answer[#answer + 1] = at and string.format('%.0f', at) or ''
end
if is_new then call('HSET', rate, 'until', string.format('%.0f', till)) end
if #gone > 0 then call('ZREM', looks, unpack(gone)) end
if #placed > 0 then
  call('ZADD', looks, unpack(placed))
  local refused = (whole(known[6]) or 0) + #placed / 2
  call('HSET', rate, 'again', string.format('%.0f', again), 'refused', string.format('%.0f', refused))
end
local kept = math.ceil((math.max(last or 0, till, now) - now + KEPT_US) / 1000000)
call('EXPIRE', rate, kept)
call('EXPIRE', looks, kept)
return answer
