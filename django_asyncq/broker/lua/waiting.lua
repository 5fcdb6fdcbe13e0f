-- Let tasks wait at a gate; `gate_acquire` and `gate_wait` begin with this.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing.
-- Invariant: a task that waits already keeps its place. Higher priorities are first, then those that have waited
--       longest: a score is the millisecond from which a task waits, minus PRIORITY_STEP for each priority. The order is kept from the first waiter on; only a look at the
--       waiters makes that last longer, so that waiters nobody looks at hold up nobody for long.
local LONGEST_WAIT_SECONDS = 86400
-- More than the milliseconds of a century; a hundred priorities of it are exact in a double.
local PRIORITY_STEP = 2 ^ 42

-- ids: of one moment; they are ordered by id. priorities: theirs. time: of Redis. own_limit: that the tasks bring
-- along, or "". is_next: whether they are before all others, because they have just lost the slots that were theirs.
-- scores_before: of each the score that it had in another line, or false; nil for none.
local function wait_at(waiters, meta, ids, priorities, time, own_limit, is_next, scores_before)
  local since, scores = time[1] * 1000 + math.floor(time[2] / 1000), {}
  local first = is_next and tonumber(call('ZRANGE', waiters, 0, 0, 'WITHSCORES')[2])
  for n, id in ipairs(ids) do
    local before = scores_before and tonumber(scores_before[n] or '')
    local score = before or first and first - 1 or since - (whole(priorities[n]) or 0) * PRIORITY_STEP
    scores[#scores + 1], scores[#scores + 2] = string.format('%.0f', score), id
  end
  if not is_next and call('ZCARD', waiters) == 0 then call('HSET', meta, 'kept', time[1]) end
  if own_limit ~= '' then call('HSET', meta, 'own_limit', own_limit) end
  call('ZADD', waiters, 'NX', unpack(scores))
  call('EXPIRE', waiters, LONGEST_WAIT_SECONDS)
end
