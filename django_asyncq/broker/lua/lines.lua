-- Put pending tasks where `dequeue` finds them: plain ones by their priority, those of a key in fair order within it.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing. places: the keys of pending, priority and fair. level: minus a priority, so that lower comes first.
--       In fair: "<level>" has the tag up to which a level was served, "<level>:<key>" that of the last task of a
--       key, "<level>:" that of the next plain task, while some wait. All are scores of the level.
-- Invariant: a tag is a whole number of units, 8192 for a task of weight 1, and the score of a task is its level and its
--       tag / 2^46. A double holds that exactly for every priority, so 8 * 10^9 tasks keep their order; later ones, if
--       the queue was never empty, go by their ids. Fair has at most as many keys as tasks wait, and some hundred.
--       Source: Golestani 1994, self-clocked fair queueing; Goyal, Vin, Cheng 1996, start-time fair queueing.
local UNITS, LAST_TAG, MOST_PRIORITY, PLAIN_STEP = 2 ^ 46, 2 ^ 46 - 1, 100, 8192
-- More keys than one call adds. A queue that nobody uses for this time begins anew.
local MOST_FORGOTTEN, FAIR_SECONDS = 400, 604800

local function score_of(level, tag)
  return string.format('%.17g', level + math.min(tag, LAST_TAG) / UNITS)
end

-- Return the tag that a score of a level stands for, or nil.
local function tag_of(score, level)
  local tag = score and math.floor((tonumber(score) - level) * UNITS + 0.5)
  return tag and tag >= 0 and tag <= LAST_TAG and tag or nil
end

-- Return the member of fair for a key; for the next plain task if it is empty.
local function line_of(level, key)
  return string.format('%d:', level) .. key
end

-- Return tag, step and key of a field `fair`; nothing if it cannot be read. The tag is 0 until the task has one.
local function fair_of(text)
  local tag, step, key = string.match(text or '', '^(%d+) (%d+) (.+)$')
  tag, step = whole(tag), whole(step)
  if tag and step and step > 0 and step <= 2 ^ 30 then return tag, step, key end
end

-- Return the tag up to which a level was served, and forget the keys of which nothing waits behind it.
local clocks, lasts = {}, {}
local function clock_of(places, level)
  if clocks[level] then return clocks[level] end
  local own = string.format('%d', level)
  local tag = tag_of(call('ZSCORE', places.fair, own), level)
  if not tag then
    -- Nothing fair has waited, or Redis has lost what it knew: then the first that waits is the next.
    local high = string.format('(%d', level + 1)
    local first = call('ZRANGEBYSCORE', places.priority, '(' .. own, high, 'WITHSCORES', 'LIMIT', 0, 1)[2]
    tag = math.max((tag_of(first, level) or 1) - 1, 0)
    call('ZADD', places.fair, score_of(level, tag), own)
  end
  local idle, plain = {}, line_of(level, '')
  for _, member in ipairs(call('ZRANGEBYSCORE', places.fair, own, score_of(level, tag), 'LIMIT', 0, MOST_FORGOTTEN)) do
    if member ~= own and member ~= plain then idle[#idle + 1] = member end
  end
  if #idle > 0 then call('ZREM', places.fair, unpack(idle)) end
  call('EXPIRE', places.fair, FAIR_SECONDS)
  clocks[level] = tag
  return tag
end

-- Return what `enter_line` needs, nil for what a hash does not have. priority: as a call has it: "<number>", or with a
-- fair key "<number> <step> <key>".
local function read_line(priority)
  local number, owner = string.match(priority, '^(%S+) (.+)$')
  number = number or priority
  return number ~= '0' and number or nil, owner and '0 ' .. owner
end

-- Note it in the hash of a task that waits elsewhere first.
local function note_line(key, priority)
  local number, fair = read_line(priority)
  if number then call('HSET', key, 'priority', number) end
  if fair then call('HSET', key, 'fair', fair) end
end

-- Make a task wait for `dequeue`. priority, fair: of its hash. how: nil for a new one; 'next' for one that was dequeued
-- before; 'back' for one that was taken out of its place, and not dequeued.
local function enter_line(places, key, id, priority, fair, how)
  local known, step, owner = fair_of(fair)
  local level = -(whole(priority) or 0)
  if not step or math.abs(level) > MOST_PRIORITY then
    if whole(priority) then return call('ZADD', places.priority, level, id) end
    return call(how and 'RPUSH' or 'LPUSH', places.pending, id)
  end
  local tag = clock_of(places, level)
  if how == 'back' and known > 0 then
    tag = known
  elseif how then
    -- Its place was not behind what was served since. After a new numbering it may be, and is no place any more.
    tag = math.max(math.min(known > 0 and known or tag, tag), 1)
  else
    local line = line_of(level, owner)
    local last = lasts[line] or tag_of(call('ZSCORE', places.fair, line), level) or 0
    tag = math.min(math.max(tag, last) + step, LAST_TAG)
    lasts[line] = tag
    call('ZADD', places.fair, score_of(level, tag), line)
  end
  call('HSET', key, 'fair', string.format('%.0f %d ', tag, step) .. owner)
  call('ZADD', places.priority, score_of(level, tag), id)
end

-- Take back what a key has paid for a task that is removed unserved, or its later ones would wait for it.
local function leave_line(places, priority, fair)
  local tag, step, owner = fair_of(fair)
  local level = -(whole(priority) or 0)
  if not step or math.abs(level) > MOST_PRIORITY or tag <= clock_of(places, level) then return end
  local last = tag_of(call('ZSCORE', places.fair, line_of(level, owner)), level)
  if not last then return end
  local score = score_of(level, math.max(last - step, clock_of(places, level)))
  call('ZADD', places.fair, score, line_of(level, owner))
end
