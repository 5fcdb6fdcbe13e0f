-- Settle entries that another program has left in a state which their rows show now: remove what has succeeded, and
-- mark the others, so that a later change is noticed.
-- KEYS: 1 completed, 2 retry
-- ARGV: 1 task key prefix, then for each task: id, fence it was seen with ("": none), state it was seen in, fence of its
--       row ("0": it gets none)
-- Returns one word for each: "removed", "settled", or "stale" (it has changed since; nothing changes now).
-- Invariant: an id stays in its one list, or goes with its hash. No fence falls. A lock that another id holds stays.
local words = {}
for i = 2, #ARGV, 4 do
  local id, fence, state, higher = unpack(ARGV, i, i + 3)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state', 'unique_key', 'waited')
  if known[2] ~= state or (known[1] or '') ~= fence then
    words[#words + 1] = 'stale'
  elseif state == 'completed' then
    call('ZREM', KEYS[1], id)
    release_lock(known[3], id)
    announce_over(known[4], id)
    call('DEL', key)
    words[#words + 1] = 'removed'
  else
    call('HSET', key, 'settled', state == 'retry' and 'retry ' .. (call('ZSCORE', KEYS[2], id) or '') or state)
    if tonumber(higher) > (fence_of(known[1]) or 0) then call('HSET', key, 'fence', higher) end
    call('HDEL', key, 'worker', 'unhandled_at')
    if state == 'archived' then
      announce_over(known[4], id)
      call('HDEL', key, 'waited')
    end
    words[#words + 1] = 'settled'
  end
end
return words
