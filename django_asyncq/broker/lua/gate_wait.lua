-- Let tasks wait at a gate, because their rows say that they do.
-- KEYS: 1 meta (hash), 2 waiters (zset: task id -> place, see `waiting`)
-- ARGV: 1 limit that the tasks bring along ("": none), 2 "next" if they are before all others or "", then for each
--       task: id, priority
-- Returns: nothing.
-- Invariant: as in `wait_at`.
local ids, priorities = {}, {}
for i = 3, #ARGV, 2 do ids[#ids + 1], priorities[#priorities + 1] = ARGV[i], ARGV[i + 1] end
wait_at(KEYS[2], KEYS[1], ids, priorities, call('TIME'), ARGV[1], ARGV[2] == 'next')
