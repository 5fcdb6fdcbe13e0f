-- Remove waiting tasks whose row is final, at most 50 a call.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 suspects, 6 due (ms), 7 fair
-- ARGV: 1 task key prefix, then for each task: id, fence ("" for none) as it was seen before the row was read
-- Returns how many tasks were removed.
-- Invariant: a task that was pushed or dequeued since then has another fence or state, and stays.
local waits = {pending = true, scheduled = true, retry = true}
local places = {priority = KEYS[2], fair = KEYS[7]}
local removed = 0
for i = 2, #ARGV, 2 do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  local known = call('HMGET', key, 'state', 'fence', 'unique_key', 'waited', 'priority', 'fair')
  if waits[known[1]] and (known[2] or '') == ARGV[i + 1] then
    local waited = 0
    for zset = 2, 5 do waited = waited + call('ZREM', KEYS[zset], id) end
    if waited == 0 then call('LREM', KEYS[1], -1, id) end
    call('ZREM', KEYS[6], id)
    if known[6] and known[1] == 'pending' then leave_line(places, known[5], known[6]) end
    release_lock(known[3], id)
    announce_over(known[4], id)
    removed = removed + call('DEL', key)
  end
end
return removed
