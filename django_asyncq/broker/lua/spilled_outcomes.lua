-- Read the outcomes of runs whose worker could not record them.
-- KEYS: 1 pending (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, then task ids
-- Returns {id, outcome, …} for the tasks that have one.
-- Invariant: nothing changes.
local reply = {}
for i = 2, #ARGV do
  local outcome = call('HGET', ARGV[1] .. ARGV[i], 'outcome')
  if outcome then
    reply[#reply + 1] = ARGV[i]
    reply[#reply + 1] = outcome
  end
end
return reply
