-- Archive tasks that have no row, with a text as their error.
-- KEYS: 1 active, 2 lease, 3 held, 4 retry, 5 archived
-- ARGV: 1 task key prefix, 2 the error as a field of the message, then for each task: id, fence of the caller's lease
--       ("": it waits in retry)
-- Returns one word for each: "archived", "stale" (nothing changed) or "missing" (no hash).
-- Invariant: as in `archive`; nothing is deleted, here not even by trimming. The message keeps all its bytes: of a field
--       that it has twice, the last counts.
local now = call('TIME')[1]
local words = {}
for i = 3, #ARGV, 2 do
  local id, fence = ARGV[i], ARGV[i + 1]
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state', 'msg')
  local is_mine = fence == '' or (known[1] or '0') == fence
  if known[2] and (not is_mine or is_elsewhere(known[2], fence == '' and 'retry' or 'active')) then
    words[#words + 1] = 'stale'
  else
    call('LREM', KEYS[1], 0, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    call('ZREM', KEYS[4], id)
    if known[2] then
      call('HDEL', key, 'worker', 'parked_at', 'outcome', 'outcome_waited')
      call('ZADD', KEYS[5], now, id)
      call('HSET', key, 'state', 'archived', 'msg', (known[3] or '') .. ARGV[2])
    end
    words[#words + 1] = known[2] and 'archived' or 'missing'
  end
end
return words
