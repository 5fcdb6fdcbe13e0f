-- Tell how runs ended whose worker could not record it.
-- KEYS: 1 pending, which only says where the queue lives   ARGV: 1 task key prefix, then task ids
-- Returns {id, outcome, …} for those that have one. Invariant: nothing changes.
local reply = {}
for i = 2, #ARGV do
  local outcome = redis.call('HGET', ARGV[1] .. ARGV[i], 'outcome')
  if outcome then
    reply[#reply + 1] = ARGV[i]
    reply[#reply + 1] = outcome
  end
end
return reply
