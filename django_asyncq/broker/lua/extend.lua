-- Renew the leases of all tasks that some worker processes hold.
-- KEYS: 1 lease; then for each worker: what it holds, and with handoff: its handoff
-- ARGV: 1 task key prefix, 2 lease seconds, 3 number of keys for each worker, then the ids of all tasks that these run
-- Returns for each worker {how many leases were renewed, id of a task it has lost, …}; a lost task is no longer held.
-- Invariant: a lease that another run holds, or that nobody holds, is never renewed. Nor is that of a task which was
--       handed to a worker that has neither read nor begun it: the worker may be frozen while others are idle.
local lease_end = call('TIME')[1] + ARGV[2]
local begun, replies = {}, {}
for i = 4, #ARGV do begun[ARGV[i]] = true end
for worker = 2, #KEYS, tonumber(ARGV[3]) do
  local held, reply, unread = call('HGETALL', KEYS[worker]), {0}, {}
  for _, id in ipairs(ARGV[3] == '2' and call('HVALS', KEYS[worker + 1]) or {}) do unread[id] = not begun[id] end
  -- At maxmemory, Redis refuses ZADD unless the script has written before. HDEL is never refused, and changes nothing.
  call('HDEL', KEYS[worker], '')
  for i = 1, #held, 2 do
    local id = held[i]
    if call('HGET', ARGV[1] .. id, 'fence') == held[i + 1] and call('ZSCORE', KEYS[1], id) then
      if not unread[id] then
        call('ZADD', KEYS[1], 'XX', lease_end, id)
        reply[1] = reply[1] + 1
      end
    else
      call('HDEL', KEYS[worker], id)
      reply[#reply + 1] = id
    end
  end
  replies[#replies + 1] = reply
end
return replies
