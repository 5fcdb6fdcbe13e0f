-- Note the newest progress of runs with their tasks.
-- KEYS: 1 pending (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, then for each run: id, fence, progress as JSON
-- Returns how many were noted.
-- Invariant: a task without a message is unchanged, so no hash is made; so is one that another run holds.
local noted = 0
for i = 2, #ARGV, 3 do
  local key = ARGV[1] .. ARGV[i]
  local found = call('HMGET', key, 'msg', 'fence')
  if found[1] and found[2] == ARGV[i + 1] then
    call('HSET', key, 'progress', ARGV[i + 1] .. ' ' .. ARGV[i + 2])
    noted = noted + 1
  end
end
return noted
