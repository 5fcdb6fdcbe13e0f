-- Make an entry without a row pending, as asynq's tools do.
-- KEYS: 1 pending, 2 scheduled, 3 retry, 4 archived, 5 due (ms), 6 tokens (see `waking`)
-- ARGV: 1 key of the entry, 2 its id, then each state from which it may move: scheduled, retry or archived
-- Returns "moved"; or, with nothing changed, the state that it has, "" for none, or "row" (it is that of a row by now).
-- Invariant: an id is in one list. What another program has changed in the meantime stays as it is.
local place = {scheduled = KEYS[2], retry = KEYS[3], archived = KEYS[4]}
local known = call('HMGET', ARGV[1], 'state', 'msg', 'row')
local state = known[2] and known[1] or ''
if known[3] then return 'row' end
for i = 3, #ARGV do
  if state == ARGV[i] then
    local time = call('TIME')
    leave(place, KEYS[5], state, ARGV[2])
    call('HSET', ARGV[1], 'state', 'pending', 'pending_since', time[1] .. ('00000' .. time[2]):sub(-6) .. '000')
    call('LPUSH', KEYS[1], ARGV[2])
    wake(KEYS[6], 1)
    return 'moved'
  end
end
return state
