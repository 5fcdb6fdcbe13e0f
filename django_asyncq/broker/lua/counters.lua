-- Count finished tasks by the minute and the day, and in the totals; `done`, `retry` and `archive` begin with this.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing.
-- Invariant: a total never overflows. A counter that is no whole number is set aside, and begins again.
-- The minutes of an hour are kept for 8 days, the days for 90.
local SHORTER = 82 * 86400

local function is_odd(reply, key)
  if type(reply) ~= 'table' then return false end
  if string.find(reply.err, 'integer', 1, true) or string.find(reply.err, 'overflow', 1, true) then set_aside(key) end
  return true
end

local function add(key, count)
  local reply = redis.pcall('INCRBY', key, count)
  return is_odd(reply, key) and call('INCRBY', key, count) or reply
end

local function add_to_minute(key, field, count)
  local reply = redis.pcall('HINCRBY', key, field, count)
  return is_odd(reply, key) and call('HINCRBY', key, field, count) or reply
end

-- days, totals: keys. minutes: the key of this hour. expires_at: of the day's counters. largest: of the totals; the last
-- one follows the first.
local function add_to_counters(days, totals, minutes, count, expires_at, largest)
  for _, key in ipairs(days) do
    if add(key, count) == count then call('EXPIREAT', key, expires_at) end
  end
  -- It is a whole number of hours from now, so its minute is that of now.
  local minute = string.format('%02d', math.floor(expires_at % 3600 / 60))
  for number, letter in ipairs({'p', 'f'}) do
    if days[number] and add_to_minute(minutes, letter .. minute, count) == count then
      call('EXPIREAT', minutes, expires_at - SHORTER)
    end
  end
  local total = whole(call('GET', totals[1]), 1e19)
  local is_full = total and total + count >= tonumber(largest)
  for _, key in ipairs(totals) do
    if is_full then call('SET', key, count) else add(key, count) end
  end
end
