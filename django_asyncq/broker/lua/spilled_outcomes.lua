-- Read the outcomes of runs whose worker could not record them.
-- KEYS: 1 pending (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, 2 largest outcome in bytes, then task ids
-- Returns {id, outcome, fence of the outcome it has waited for or "", …} for the tasks that have one of such a size.
-- Invariant: nothing changes.
local reply = {}
for i = 3, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  local size = call('HSTRLEN', key, 'outcome')
  if size > 0 and size <= tonumber(ARGV[2]) then
    local known = call('HMGET', key, 'outcome', 'outcome_waited')
    reply[#reply + 1] = ARGV[i]
    reply[#reply + 1] = known[1]
    reply[#reply + 1] = known[2] or ''
  end
end
return reply
