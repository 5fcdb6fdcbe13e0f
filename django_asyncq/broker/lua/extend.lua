-- Renew the leases of all tasks that some worker processes hold.
-- KEYS: 1 lease; then for each worker: what it holds, and with handoff: its handoff
-- ARGV: 1 task key prefix, 2 lease seconds, 3 number of keys for each worker, 4 number of tasks whose messages are
--       wanted, then the row ids of all tasks that these run, those of wanted messages first
-- Returns for each worker {how many leases were renewed, {id of a task it has lost, …}, {id of a cancelled task, …},
--       {row id, id, message of a wanted one, …}}; a lost task is no longer held. Of a long message only its beginning.
-- Invariant: a lease that another run holds, or that nobody holds, is never renewed. Nor is that of a task which was
--       handed to a worker that has neither read nor begun it: the worker may be frozen while others are idle.
local lease_end = call('TIME')[1] + ARGV[2]
local begun, wanted, replies = {}, {}, {}
for i = 5, #ARGV do begun[ARGV[i]] = true end
for i = 5, 4 + ARGV[4] do wanted[ARGV[i]] = true end
-- Return what is shown of a message: one of 16 KiB or more has a payload that is not shown.
local function shown(msg) return #msg < 16384 and msg or string.sub(msg, 1, 1024) end

for worker = 2, #KEYS, tonumber(ARGV[3]) do
  local held, reply, unread = call('HGETALL', KEYS[worker]), {0, {}, {}, {}}, {}
  for _, id in ipairs(ARGV[3] == '2' and call('HVALS', KEYS[worker + 1]) or {}) do unread[id] = not begun[id] end
  -- At maxmemory, Redis refuses ZADD unless the script has written before. HDEL is never refused, and changes nothing.
  call('HDEL', KEYS[worker], '')
  for i = 1, #held, 2 do
    local id = held[i]
    local found = call('HMGET', ARGV[1] .. id, 'fence', 'cancel', 'row')
    local row = found[3] or id
    if found[1] == held[i + 1] and call('ZSCORE', KEYS[1], id) then
      if found[2] then table.insert(reply[3], id) end
      if not unread[id] or begun[row] then
        call('ZADD', KEYS[1], 'XX', lease_end, id)
        reply[1] = reply[1] + 1
        local msg = wanted[row] and call('HGET', ARGV[1] .. id, 'msg')
        if msg then for _, each in ipairs({row, id, shown(msg)}) do table.insert(reply[4], each) end end
      end
    else
      call('HDEL', KEYS[worker], id)
      table.insert(reply[2], id)
    end
  end
  replies[#replies + 1] = reply
end
return replies
