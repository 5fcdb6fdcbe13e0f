-- Let tasks wait at a gate; `gate_acquire` and `gate_wait` begin with this.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing.
-- Invariant: a task that waits already keeps its place. The order is kept from the first waiter on; only a look at the
--       waiters makes that last longer, so that waiters nobody looks at hold up nobody for long.
local LONGEST_WAIT_SECONDS = 86400

-- ids: of one moment; they are ordered by id. time: of Redis. own_limit: that the tasks bring along, or "". is_next:
-- whether they are before all others, because they have just lost the slots that were theirs.
local function wait_at(waiters, meta, ids, time, own_limit, is_next)
  local since, scores = time[1] .. ('00000' .. time[2]):sub(-6), {}
  local first = is_next and call('ZRANGE', waiters, 0, 0, 'WITHSCORES')[2]
  if first then since = string.format('%.0f', first - 1) end
  for _, id in ipairs(ids) do scores[#scores + 1], scores[#scores + 2] = since, id end
  if not is_next and call('ZCARD', waiters) == 0 then call('HSET', meta, 'kept', time[1]) end
  if own_limit ~= '' then call('HSET', meta, 'own_limit', own_limit) end
  call('ZADD', waiters, 'NX', unpack(scores))
  call('EXPIRE', waiters, LONGEST_WAIT_SECONDS)
end
