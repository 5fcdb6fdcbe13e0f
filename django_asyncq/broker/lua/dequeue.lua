-- Take tasks to be run: high priorities, then pending from the right, then low priorities.
-- KEYS: 1 pending, 2 priority, 3 active, 4 lease, 5 paused, 6 held by this worker; but in a cluster: 7 standby of this
--       worker, 8 what is handed to it
-- ARGV: 1 task key prefix, 2 how many, 3 lease seconds, 4 worker id, 5 the queue when the worker stands by: one task is
--       handed to it, whatever it does now; "" when it asks
-- Returns {"paused"}, {"withdrawn"} (it stands by no longer), or {"taken", id, fence, …}; "more": it stood by, more is left
-- Invariant: what is taken is active, leased and held, with a fence above any before; an id without message, or one that
--       is not pending (it stands here twice), is dropped. Who has taken anything stands by no longer, and to who has
--       not yet read what he was handed nothing is handed.
local stands_by = ARGV[5] ~= ''
if stands_by then
  -- What BLMOVE has moved goes back first: it is taken in its turn, or by others.
  local moved = redis.call('RPOP', KEYS[8])
  if moved then redis.call('RPUSH', KEYS[1], moved) end
  local noted = redis.call('HKEYS', KEYS[7])
  if #noted ~= 1 or noted[1] ~= '' then return {'withdrawn'} end
end
if redis.call('EXISTS', KEYS[5]) == 1 then return {'paused'} end
local wanted, ids = tonumber(ARGV[2]), {}

local function take_priority(low, high)
  if #ids >= wanted then return end
  local found = redis.call('ZRANGEBYSCORE', KEYS[2], low, high, 'LIMIT', 0, wanted - #ids)
  for _, id in ipairs(found) do ids[#ids + 1] = id end
  if #found > 0 then redis.call('ZREM', KEYS[2], unpack(found)) end
end

take_priority('-inf', '(0')
if #ids < wanted then
  local found = redis.call('RPOP', KEYS[1], wanted - #ids)
  for _, id in ipairs(found or {}) do ids[#ids + 1] = id end
end
take_priority('(0', '+inf')

local lease_end = redis.call('TIME')[1] + ARGV[3]
local taken, leases, held = {}, {}, {}
for _, id in ipairs(ids) do
  local key = ARGV[1] .. id
  local known = redis.call('HMGET', key, 'state', 'msg', 'fence')
  if known[2] and (known[1] or 'pending') == 'pending' then
    local fence = (tonumber(known[3]) or 0) + 1
    redis.call('HSET', key, 'fence', fence, 'state', 'active', 'worker', ARGV[4])
    redis.call('HDEL', key, 'pending_since')
    taken[#taken + 1] = id
    leases[#leases + 1] = lease_end
    leases[#leases + 1] = id
    held[#held + 1] = id
    held[#held + 1] = fence
  end
end
if #taken > 0 then
  redis.call('LPUSH', KEYS[3], unpack(taken))
  redis.call('ZADD', KEYS[4], unpack(leases))
  redis.call('HSET', KEYS[6], unpack(held))
  if stands_by then redis.call('HSET', KEYS[7], ARGV[5], taken[1]) end
  if KEYS[7] then redis.call('HDEL', KEYS[7], '') end
end
local is_more = stands_by and redis.call('EXISTS', KEYS[1], KEYS[2]) > 0
return {is_more and 'more' or 'taken', unpack(held)}
