-- Move what can be no task from active into the list of the rejected.
-- KEYS: 1 active, 2 lease, 3 held, 4 rejected
-- ARGV: 1 task key prefix, 2 how many are kept, 3 for how many seconds, then for each task: id, fence, document
-- Returns one word for each: "rejected", "stale" (nothing changed) or "missing" (no hash).
-- Invariant: the hash is deleted only with its document in the list.
local words = {}
for i = 4, #ARGV, 3 do
  local id, fence, document = unpack(ARGV, i, i + 2)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state')
  if known[2] and ((known[1] or '0') ~= fence or is_elsewhere(known[2], 'active')) then
    words[#words + 1] = 'stale'
  else
    if known[2] then
      call('LPUSH', KEYS[4], document)
      call('LTRIM', KEYS[4], 0, ARGV[2] - 1)
      call('EXPIRE', KEYS[4], ARGV[3])
    end
    call('LREM', KEYS[1], 0, id)
    call('ZREM', KEYS[2], id)
    call('HDEL', KEYS[3], id)
    call('DEL', key)
    words[#words + 1] = known[2] and 'rejected' or 'missing'
  end
end
return words
