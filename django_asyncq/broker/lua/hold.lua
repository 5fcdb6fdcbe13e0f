-- Hold tasks that wait, wherever they do, for a transaction that is about to close them. At most 50 a call.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 active, 7 lease, 8 groups, 9 due (ms), 10 suspects
-- ARGV: 1 task key prefix, 2 group key prefix, 3 holder, 4 how holders begin, 5 lease seconds; then for each task: id,
--       its row or ""
-- Returns one word for each: the fence of the holder's lease; or, with nothing changed, "claimed" (a worker has it, or
--       another program has finished it) or "missing" (no message, or that of another row).
-- Invariant: a held task is active and leased, as one that a worker has claimed. So no worker gets it, and nothing that
--       pushes it changes anything, until its holder takes it out or its lease expires. What an earlier holder has left
--       is held anew: the lock of the row says that its transaction is over.
local lease_end = call('TIME')[1] + ARGV[5]
local words = {}
for i = 6, #ARGV, 2 do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  local known = call('HMGET', key, 'state', 'fence', 'worker', 'group')
  local state = known[1]
  local is_held = state == 'active' and string.sub(known[3] or '', 1, #ARGV[4]) == ARGV[4]
  local is_leased = not is_elsewhere(state, 'active') and (state == 'active' or call('ZSCORE', KEYS[7], id))
  if is_of_other(key, ARGV[i + 1]) then
    words[#words + 1] = 'missing'
  elseif state == 'completed' or is_leased and not is_held then
    words[#words + 1] = 'claimed'
  elseif call('HEXISTS', key, 'msg') == 0 then
    words[#words + 1] = 'missing'
  else
    local waited = call('ZREM', KEYS[2], id) + call('ZREM', KEYS[10], id)
    -- asynq's tools put tasks into pending whatever their priority.
    if state == 'pending' and waited == 0 then call('LREM', KEYS[1], -1, id) end
    for zset = 3, 5 do call('ZREM', KEYS[zset], id) end
    call('ZREM', KEYS[9], id)
    if known[4] then
      local group = ARGV[2] .. known[4]
      if call('ZREM', group, id) == 1 and call('EXISTS', group) == 0 then call('SREM', KEYS[8], known[4]) end
    end
    if state ~= 'active' then call('LPUSH', KEYS[6], id) end
    -- A repeated call, whose first reply was lost, has the same answer.
    local is_mine = is_held and known[3] == ARGV[3]
    local fence = (fence_of(known[2]) or 0) + (is_mine and 0 or 1)
    call('HSET', key, 'state', 'active', 'fence', fence, 'worker', ARGV[3])
    call('HDEL', key, 'pending_since', 'suspect')
    call('ZADD', KEYS[7], lease_end, id)
    words[#words + 1] = string.format('%.0f', fence)
  end
end
return words
