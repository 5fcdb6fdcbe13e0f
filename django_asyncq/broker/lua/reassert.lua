-- Recreate the entries of running tasks after Redis lost its memory.
-- KEYS: 1 active, 2 lease, 3 held by this worker
-- ARGV: 1 task key prefix, 2 lease seconds, 3 worker id, then for each task: id, message, fence, priority
--       (see `read_line`), id of its row or ""
-- Returns one word for each: "reasserted"; or, with nothing changed, "exists" (same fence) or "stale" (other fence).
-- Invariant: an existing entry never changes. The priority is kept, so a requeue puts the task where it was.
local lease_end = call('TIME')[1] + ARGV[2]
local words = {}
for i = 4, #ARGV, 5 do
  local id, message, fence, priority, row = unpack(ARGV, i, i + 4)
  local key = ARGV[1] .. id
  if call('HEXISTS', key, 'msg') == 1 then
    words[#words + 1] = call('HGET', key, 'fence') == fence and 'exists' or 'stale'
  else
    call('HSET', key, 'msg', message, 'state', 'active', 'fence', fence, 'worker', ARGV[3])
    if row ~= '' then call('HSET', key, 'row', row) end
    note_line(key, priority)
    call('LREM', KEYS[1], 0, id)
    call('LPUSH', KEYS[1], id)
    call('ZADD', KEYS[2], lease_end, id)
    call('HSET', KEYS[3], id, fence)
    words[#words + 1] = 'reasserted'
  end
end
return words
