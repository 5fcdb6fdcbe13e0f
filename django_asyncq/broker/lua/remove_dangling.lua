-- Remove ids without a message from the list or zset they were found in, at most 50 a call.
-- KEYS: 1 list or zset, 2 due (ms)
-- ARGV: 1 task key prefix, 2 "list" or "zset", then task ids
-- Returns how many ids were removed.
-- Invariant: an id that has a message stays, whatever program wrote it.
local removed = 0
for i = 3, #ARGV do
  local id = ARGV[i]
  if call('HEXISTS', ARGV[1] .. id, 'msg') == 0 then
    local count = ARGV[2] == 'list' and call('LREM', KEYS[1], 0, id) or 0
    if ARGV[2] == 'zset' then
      count = call('ZREM', KEYS[1], id)
      call('ZREM', KEYS[2], id)
    end
    if count > 0 then removed = removed + 1 end
  end
end
return removed
