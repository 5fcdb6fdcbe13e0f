-- Let tasks wait at a gate, because their rows say that they do.
-- KEYS: 1 meta (hash), 2 waiters (zset: task id -> since when, Unix microseconds)
-- ARGV: 1 limit that the tasks bring along ("": none), 2 "next" if they are before all others or "", then task ids
-- Returns: nothing.
-- Invariant: as in `wait_at`.
local ids = {}
for i = 3, #ARGV do ids[#ids + 1] = ARGV[i] end
wait_at(KEYS[2], KEYS[1], ids, call('TIME'), ARGV[1], ARGV[2] == 'next')
