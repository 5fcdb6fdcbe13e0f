-- Renew the leases of all tasks that some worker processes hold.
-- KEYS: 1 lease; then for each worker what it holds
-- ARGV: 1 task key prefix, 2 lease seconds, then the row ids of running tasks whose messages are wanted
-- Returns for each worker {how many leases were renewed, {id of a task it has lost, …}, {request to stop, …},
--       {row id, id, message of a wanted one, …}}; a lost task is no longer held. Of a long message only its beginning.
-- Invariant: a lease that another run holds, or that nobody holds, is never renewed.
local lease_end = call('TIME')[1] + ARGV[2]
local wanted, replies = {}, {}
for i = 3, #ARGV do wanted[ARGV[i]] = true end
-- Return what is shown of a message: one of 16 KiB or more has a payload that is not shown.
local function shown(msg) return #msg < 16384 and msg or string.sub(msg, 1, 1024) end

for worker = 2, #KEYS do
  local held, reply = call('HGETALL', KEYS[worker]), {0, {}, {}, {}}
  -- At maxmemory, Redis refuses ZADD unless the script has written before. HDEL is never refused, and changes nothing.
  call('HDEL', KEYS[worker], '')
  for i = 1, #held, 2 do
    local id = held[i]
    local found = call('HMGET', ARGV[1] .. id, 'fence', 'cancel', 'row')
    local row = found[3] or id
    if found[1] == held[i + 1] and call('ZSCORE', KEYS[1], id) then
      -- More than a mark: the fence of a row that was changed while the task ran (`take_out`).
      local is_fence = found[2] and #found[2] > 1 and string.match(found[2], '^%d+$')
      if found[2] then table.insert(reply[3], is_fence and id .. ' ' .. found[2] or id) end
      call('ZADD', KEYS[1], 'XX', lease_end, id)
      reply[1] = reply[1] + 1
      local msg = wanted[row] and call('HGET', ARGV[1] .. id, 'msg')
      if msg then for _, each in ipairs({row, id, shown(msg)}) do table.insert(reply[4], each) end end
    else
      call('HDEL', KEYS[worker], id)
      table.insert(reply[2], id)
    end
  end
  replies[#replies + 1] = reply
end
return replies
