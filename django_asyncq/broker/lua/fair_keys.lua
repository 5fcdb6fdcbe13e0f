-- Find the fair keys of a queue of which most tasks wait.
-- KEYS: 1 priority, 2 fair
-- ARGV: 1 task key prefix
-- Returns key, how many of its tasks wait in one priority, …; a key of several priorities comes as often.
-- Invariant: nothing changes. At most MOST_LOOKED keys are looked at, those with the latest tags; how many wait follows
--       from the tag of the last one and from what it has paid, so it is a little off where tasks were cancelled, or
--       those of a key differ in weight.
local MOST_LEVELS, MOST_LOOKED, MOST_AT_ONE_TAG = 20, 100, 10
local found, left, low = {}, MOST_LOOKED, '-100'

local function step_of(score, key)
  for _, id in ipairs(call('ZRANGEBYSCORE', KEYS[1], score, score, 'LIMIT', 0, MOST_AT_ONE_TAG)) do
    local _, step, owner = fair_of(call('HGET', ARGV[1] .. id, 'fair'))
    if owner == key then return step end
  end
  return PLAIN_STEP
end

for _ = 1, MOST_LEVELS do
  local first = left > 0 and call('ZRANGEBYSCORE', KEYS[2], low, '(101', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  if not first then break end
  local level = math.floor(tonumber(first))
  low = string.format('%d', level + 1)
  local clock = tag_of(call('ZSCORE', KEYS[2], string.format('%d', level)), level) or 0
  local after = '(' .. score_of(level, clock)
  local members = call('ZREVRANGEBYSCORE', KEYS[2], '(' .. low, after, 'WITHSCORES', 'LIMIT', 0, left)
  left = left - #members / 2
  for i = 1, #members, 2 do
    local key, last = string.match(members[i], '^%-?%d+:(.+)$'), tag_of(members[i + 1], level)
    if key and last then
      local count = math.ceil((last - clock) / step_of(members[i + 1], key) - 0.01)
      found[#found + 1], found[#found + 2] = key, math.max(count, 1)
    end
  end
end
return found
