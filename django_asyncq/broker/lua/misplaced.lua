-- Find hashes that may be in no list, without searching a list.
-- KEYS: 1 pending, 2 priority, 3 lease, 4 scheduled, 5 retry, 6 archived, 7 completed, 8 suspects,
--       9 aggregation sets
-- ARGV: 1 task key prefix, 2 group key prefix, then task ids
-- Returns {id, "leaseless" or "orphan", …}. A pending task is reported only when it is older than the next in pending:
--       that list is first in, first out, so before then it is not late. `repair_orphans` searches the list.
--       A task that another program has put into a group has no `rules` there, unless it was the program's own, which
--       names its row.
-- Invariant: nothing changes.
local zsets = {scheduled = KEYS[4], retry = KEYS[5], archived = KEYS[6], completed = KEYS[7]}
local oldest
for _, id in ipairs(call('LRANGE', KEYS[1], -10, -1)) do
  oldest = whole(call('HGET', ARGV[1] .. id, 'pending_since'), 1e19) or oldest
end
local is_empty = call('EXISTS', KEYS[1]) == 0
local reply = {}
local function report(id, word)
  reply[#reply + 1] = id
  reply[#reply + 1] = word
end
for i = 3, #ARGV do
  local id = ARGV[i]
  local known = call('HMGET', ARGV[1] .. id, 'state', 'fence', 'pending_since', 'group', 'rules', 'row')
  local state = known[1]
  if state == 'active' and known[2] and not call('ZSCORE', KEYS[3], id) then
    report(id, 'leaseless')
  elseif state == 'pending' and not (call('ZSCORE', KEYS[2], id) or call('ZSCORE', KEYS[8], id)) then
    local since = whole(known[3], 1e19)
    local is_late = is_empty or not since or (oldest and since < oldest)
    if is_late then report(id, 'orphan') end
  elseif not is_state(state) then
    report(id, 'orphan')
  elseif state == 'aggregating' and not ((known[5] or known[6]) and is_in_group(KEYS[9], ARGV[2], known[4], id)) then
    report(id, 'orphan')
  elseif state == 'active' and not known[2] and not call('ZSCORE', KEYS[3], id) then
    report(id, 'orphan')
  elseif zsets[state] and not dated(call('ZSCORE', zsets[state], id)) then
    report(id, 'orphan')
  end
end
return reply
