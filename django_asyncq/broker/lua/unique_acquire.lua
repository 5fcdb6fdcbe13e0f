-- Take asynq's locks of unique tasks for their ids, for a short time: until they are pushed.
-- KEYS: locks (strings: id of the task that holds it)
-- ARGV: 1 seconds; then for each lock: id, id of a holder whose task is over ("": none)
-- Returns for each lock "" when the id holds it now, or else the id that does (nothing changed).
-- Invariant: a lock is taken only from the holder that was named. No TTL gets shorter.
local holders = {}
for n, lock in ipairs(KEYS) do
  local id, over = ARGV[2 * n], ARGV[2 * n + 1]
  local owner = call('GET', lock)
  if owner and owner ~= id and (over == '' or owner ~= over) then
    holders[n] = owner
  else
    if not owner or owner ~= id or call('TTL', lock) < tonumber(ARGV[1]) then call('SET', lock, id, 'EX', ARGV[1]) end
    holders[n] = ''
  end
end
return holders
