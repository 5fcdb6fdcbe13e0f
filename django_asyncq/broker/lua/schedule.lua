-- Put new tasks into the scheduled set until they are due.
-- KEYS: 1 scheduled, 2 due (ms)
-- ARGV: 1 task key prefix, 2 due channel, 3 group that they join when they are due, or "", 4 its rules, then for each
--       task: id, message, fence ("0": none), priority (see `read_line`), lock key or "", lock seconds, id of its row
--       or "", due (Unix seconds, rounded up), due (Unix ms, "0" when it is a whole second)
-- Returns one word for each: "scheduled"; or, with nothing changed, "exists" or "duplicate" (another id has the lock).
-- Invariant: an id that is in any list stays there. A refused task takes no lock. Forwarders are notified when one of
--       these tasks is now the nearest.
local words, nearer = {}, false
for i = 5, #ARGV, 9 do
  local id, message, fence, priority, lock, seconds, row, due, due_ms = unpack(ARGV, i, i + 8)
  local key = ARGV[1] .. id
  local owner = lock ~= '' and call('GET', lock)
  if owner and owner ~= id then
    words[#words + 1] = 'duplicate'
  elseif call('HEXISTS', key, 'msg') == 1 then
    words[#words + 1] = 'exists'
  else
    call('HSET', key, 'msg', message, 'state', 'scheduled')
    if lock ~= '' then
      call('SET', lock, id, 'EX', seconds)
      call('HSET', key, 'unique_key', lock)
    end
    if row ~= '' then call('HSET', key, 'row', row) end
    if fence ~= '0' then call('HSET', key, 'fence', fence) end
    note_line(key, priority)
    if ARGV[3] ~= '' then call('HSET', key, 'group', ARGV[3], 'rules', ARGV[4]) end
    call('ZADD', KEYS[1], due, id)
    if due_ms ~= '0' then call('ZADD', KEYS[2], due_ms, id) end
    local first = call('ZRANGE', due_ms ~= '0' and KEYS[2] or KEYS[1], 0, 0)[1]
    nearer = nearer or first == id
    words[#words + 1] = 'scheduled'
  end
end
if nearer then call('PUBLISH', ARGV[2], '1') end
return words
