-- Name the rows of tasks of other programs that a worker has leased, before the rows are inserted.
-- KEYS: 1 held by the worker
-- ARGV: 1 task key prefix, 2 worker id, then for each task: id, fence, id of its new row, a content of its field `row`
--       that is no row of it ("": none)
-- Returns for each: the id of its row and its new fence; both "" when the lease is another's now (nothing changed).
-- Invariant: a row that was named once stays, so a redelivery finds it. The fence is above all that were handed out, also
--       before the task was restored, which forgets its fence.
local time = call('TIME')
local now_us = time[1] * 1000000 + time[2]
local reply = {}
for i = 3, #ARGV, 4 do
  local id, fence, row, wrong = unpack(ARGV, i, i + 3)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state', 'worker', 'row')
  local named, raised = '', ''
  if known[1] == fence and known[3] == ARGV[2] and not is_elsewhere(known[2], 'active') then
    named = known[4] and known[4] ~= wrong and known[4] or row
    raised = string.format('%.0f', math.max(now_us, fence_of(fence) + 1))
    call('HSET', key, 'row', named, 'fence', raised)
    call('HSET', KEYS[1], id, raised)
  end
  reply[#reply + 1] = named
  reply[#reply + 1] = raised
end
return reply
