-- Remove what was shown of worker processes that have stopped.
-- KEYS: with "all" first 1 servers, 2 workers; then for each process: its server, what it runs, what it says of itself
-- ARGV: 1 "all" or "" (in a cluster: the first two are in other slots)
-- Returns how many processes were listed; 0 in a cluster.
-- Invariant: nothing of these processes is left. Others are not touched.
local is_all, found = ARGV[1] == 'all', 0
for i = is_all and 3 or 1, #KEYS, 3 do
  if is_all then
    found = found + call('ZREM', KEYS[1], KEYS[i])
    call('ZREM', KEYS[2], KEYS[i + 1])
  end
  for place = i, i + 2 do call('DEL', KEYS[place]) end
end
return found
