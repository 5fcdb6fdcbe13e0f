-- Tell which hashes may stand in no list, without searching one.
-- KEYS: 1 pending, 2 priority, 3 lease, 4 scheduled, 5 retry, 6 archived, 7 completed
-- ARGV: 1 task key prefix, then task ids
-- Returns {id, "leaseless" or "astray", …}. One that is pending is named when its turn has come: pending is first in,
--       first out, so nobody misses it before. `repair_orphans` searches the list.
-- Invariant: nothing changes.
local place = {scheduled = KEYS[4], retry = KEYS[5], archived = KEYS[6], completed = KEYS[7]}
local turn
for _, id in ipairs(redis.call('LRANGE', KEYS[1], -10, -1)) do
  turn = redis.call('HGET', ARGV[1] .. id, 'pending_since') or turn
end
local is_empty = redis.call('EXISTS', KEYS[1]) == 0
local reply = {}
local function name(id, word)
  reply[#reply + 1] = id
  reply[#reply + 1] = word
end
for i = 2, #ARGV do
  local id = ARGV[i]
  local known = redis.call('HMGET', ARGV[1] .. id, 'state', 'fence', 'pending_since')
  local state = known[1]
  if state == 'active' and known[2] and not redis.call('ZSCORE', KEYS[3], id) then
    name(id, 'leaseless')
  elseif state == 'pending' and not redis.call('ZSCORE', KEYS[2], id) then
    local is_due = is_empty or not known[3] or (turn and tonumber(known[3]) < tonumber(turn))
    if is_due then name(id, 'astray') end
  elseif place[state] and not redis.call('ZSCORE', place[state], id) then
    name(id, 'astray')
  end
end
return reply
