-- Put tasks into the retry set until they are due.
-- KEYS: 1 retry, 2 scheduled, 3 archived, 4 due (ms)
-- ARGV: 1 task key prefix, 2 due channel, then for each task: id, message, fence ("0": none), priority (see
--       `read_line`), lock key or "", lock seconds, id of its row or "", due (Unix seconds)
-- Returns one word for each: "parked"; or "exists" when it is anywhere else, such as pending, or the id is another
--       task's now (nothing changed).
-- Invariant: an id is in one list and has a hash; its fence marks it as a task whose row must change first. A lock
--       that another id holds stays. Forwarders are notified when one of these tasks is now the nearest.
local place = {retry = KEYS[1], scheduled = KEYS[2], archived = KEYS[3]}
local words, nearer = {}, false
for i = 3, #ARGV, 8 do
  local id, message, fence, priority, lock, seconds, row, due = unpack(ARGV, i, i + 7)
  local key = ARGV[1] .. id
  local state = call('HEXISTS', key, 'msg') == 1 and (call('HGET', key, 'state') or 'none')
  if state and not may_leave(place, state, key, row) then
    words[#words + 1] = 'exists'
  else
    if state then
      leave(place, KEYS[4], state, id)
    end
    local known = call('HGET', key, 'fence')
    if tonumber(fence) >= (fence_of(known) or 0) then known = fence end
    call('HDEL', key, 'priority', 'fair', 'pending_since')
    call('HSET', key, 'msg', message, 'state', 'retry', 'settled', 'retry ' .. due, 'fence', known)
    if row ~= '' then call('HSET', key, 'row', row) end
    note_line(key, priority)
    if lock ~= '' then
      call('SET', lock, id, 'NX', 'EX', seconds)
      call('HSET', key, 'unique_key', lock)
    end
    call('ZADD', KEYS[1], due, id)
    nearer = nearer or call('ZRANGE', KEYS[1], 0, 0)[1] == id
    words[#words + 1] = 'parked'
  end
end
if nearer then call('PUBLISH', ARGV[2], '1') end
return words
