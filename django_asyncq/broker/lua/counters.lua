-- Count finished tasks in the counters of the day and in the totals; `done`, `retry` and `archive` begin with this.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing.
-- Invariant: a total never overflows. A counter that is no whole number is set aside, and begins again.
local function add(key, count)
  local reply = redis.pcall('INCRBY', key, count)
  if type(reply) ~= 'table' then return reply end
  if string.find(reply.err, 'integer', 1, true) or string.find(reply.err, 'overflow', 1, true) then set_aside(key) end
  return call('INCRBY', key, count)
end

-- days, totals: keys. expires_at: of the day's counters. largest: of the totals; the last one follows the first.
local function add_to_counters(days, totals, count, expires_at, largest)
  for _, key in ipairs(days) do
    if add(key, count) == count then call('EXPIREAT', key, expires_at) end
  end
  local total = whole(call('GET', totals[1]), 1e19)
  local is_full = total and total + count >= tonumber(largest)
  for _, key in ipairs(totals) do
    if is_full then call('SET', key, count) else add(key, count) end
  end
end
