-- Say how many tasks are dequeued before a task with a fair key, if no other comes.
-- KEYS: 1 pending, 2 priority, 3 fair
-- ARGV: 1 id
-- Returns its place, from 1 on; 0 when it does not wait there.
-- Invariant: nothing changes. The time does not depend on how many wait.
local score = call('ZSCORE', KEYS[2], ARGV[1])
if not score then return 0 end
local level = math.floor(tonumber(score))
local before = call('ZCOUNT', KEYS[2], '-inf', '(' .. score)
local tag = tag_of(score, level)
if not tag or math.abs(level) > MOST_PRIORITY then return before + 1 end
local own = string.format('%d', level)
local next_plain = tag_of(call('ZSCORE', KEYS[3], line_of(level, '')), level)
next_plain = next_plain or (tag_of(call('ZSCORE', KEYS[3], own), level) or 0) + PLAIN_STEP
-- Plain tasks of its priority come between those of keys.
local waiting = call('LLEN', KEYS[1])
local plain = level == 0 and waiting or call('ZCOUNT', KEYS[2], own, own)
if level > 0 then before = before + waiting end
if level ~= 0 then before = before - plain end
return before + math.min(plain, math.max(math.floor((tag - next_plain) / PLAIN_STEP) + 1, 0)) + 1
