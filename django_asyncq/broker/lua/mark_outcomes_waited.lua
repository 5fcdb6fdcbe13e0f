-- Note with tasks that they have waited for a process that can verify their spilled outcome.
-- KEYS: 1 pending (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, then for each task: id, fence of its outcome
-- Returns how many were marked.
-- Invariant: a task without an outcome is unchanged, so no hash is made.
local marked = 0
for i = 2, #ARGV, 2 do
  local key = ARGV[1] .. ARGV[i]
  if call('HEXISTS', key, 'outcome') == 1 then
    call('HSET', key, 'outcome_waited', ARGV[i + 1])
    marked = marked + 1
  end
end
return marked
