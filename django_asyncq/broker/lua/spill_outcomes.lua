-- Store the outcomes of runs in the hashes of their tasks, to be recorded by another process, and expire their leases.
-- KEYS: 1 lease, 2 held
-- ARGV: 1 task key prefix, then for each task: id, fence, outcome
-- Returns one word for each: "spilled", "stale" (not active with this fence; nothing changed) or "missing" (no hash).
-- Invariant: the task stays active with its fence; its lease expires now, and its former holder does not renew it.
local now = call('TIME')[1]
local words = {}
for i = 2, #ARGV, 3 do
  local id, fence, outcome = unpack(ARGV, i, i + 2)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'fence', 'state')
  if not known[2] then
    words[#words + 1] = 'missing'
  elseif (known[1] or '0') ~= fence or is_elsewhere(known[2], 'active') then
    words[#words + 1] = 'stale'
  else
    call('HSET', key, 'outcome', outcome)
    call('ZADD', KEYS[1], now, id)
    call('HDEL', KEYS[2], id)
    words[#words + 1] = 'spilled'
  end
end
return words
