-- Mark tasks as waited for: the script that removes or archives one announces it then.
-- KEYS: 1 pending (not read; it only selects the cluster slot)
-- ARGV: 1 task key prefix, then task ids
-- Returns one word for each: "waited" or "missing" (no message).
-- Invariant: no hash is made. A stub would keep the task from being pushed.
local words = {}
for i = 2, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  local is_there = call('HEXISTS', key, 'msg') == 1
  if is_there then call('HSET', key, 'waited', '1') end
  words[#words + 1] = is_there and 'waited' or 'missing'
end
return words
