-- Look at the waiters of a gate: how many are there, and which are next for its free slots?
-- KEYS: 1 gate (zset: task id -> expiry, Unix seconds), 2 meta (hash), 3 waiters (zset: task id -> place)
-- ARGV: 1 how many ids at most
-- Returns: {word, waiters, id…}. Words: "unbuilt" (build it, then look again), "built".
-- Invariant: no slot is given here; a paused gate has none. A look that finds nothing to do keeps the order; one that
--       returns ids does not: `gate_settle` does, when something has been done with them.
local now = tonumber(call('TIME')[1])
call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local waiting = call('ZCARD', KEYS[3])
if waiting == 0 then return {'built', 0} end
local known = call('HMGET', KEYS[2], 'built', 'limit', 'own_limit', 'paused')
if not known[1] then return {'unbuilt', waiting} end
local limit = whole(known[2] or known[3])
local free = tonumber(ARGV[1])
if limit and limit > 0 then free = math.min(math.max(limit - call('ZCARD', KEYS[1]), 0), free) end
if known[4] then free = 0 end
call('EXPIRE', KEYS[3], LONGEST_WAIT_SECONDS)
if free == 0 then
  call('HSET', KEYS[2], 'kept', now)
  return {'built', waiting}
end
return {'built', waiting, unpack(call('ZRANGE', KEYS[3], 0, free - 1))}
