-- Dequeue tasks to run: priorities above 0, then pending from the right, then priorities below 0. Of one priority, fair
-- tasks come in the order of their tags, and plain ones between them as if they were of one key more (see `lines`).
-- KEYS: 1 pending, 2 priority, 3 active, 4 lease, 5 paused, 6 held by this worker, 7 tokens (see `waking`),
--       8 fair
-- ARGV: 1 task key prefix, 2 how many, 3 lease seconds, 4 worker id, 5 digest of the names that it knows, or ""
-- Returns {"paused"}, {"left"} (what waits is left to others for now), or {"taken", id, fence, …}; "more" when others
--       were left
-- Invariant: each returned task is active, leased and held, with a fence above any before. An id without a message, or
--       one that is not pending or waits in suspects (it stood here twice), is dropped. One that is left to other
--       programs goes to the end of pending. One that is left to workers with other names keeps its place; left_until
--       has the digests that do not know it behind the time. A queue that is empty now has no
--       tokens; one from which tasks were taken, and that has more, wakes another worker.
local MOST_LEFT, MOST_PASSED, LONGEST_LEFT = 200, 1000, 60
if call('GET', KEYS[5]) then
  -- When it is resumed, that wakes all workers.
  call('DEL', KEYS[7])
  return {'paused'}
end
local wanted, now = tonumber(ARGV[2]), tonumber(call('TIME')[1])
local taken, leases, held, left, passed = {}, {}, {}, {}, {}
-- Of what is passed over, where it waits; nothing for pending.
local scores = {}
local places = {pending = KEYS[1], priority = KEYS[2], fair = KEYS[8]}

-- Return the digests to which a task is not given now; '' when it is left to other programs, nil when to nobody.
local function left_by(text)
  local till, digests = string.match(text, '^(%d+)(.*)$')
  local seconds_left = (whole(till) or 0) - now
  return seconds_left > 0 and seconds_left <= LONGEST_LEFT and digests or nil
end

local function take(id)
  local key = ARGV[1] .. id
  local known = call('HMGET', key, 'state', 'msg', 'fence', 'suspect', 'left_until')
  local digests = known[5] and left_by(known[5])
  if digests == '' then
    left[#left + 1] = id
  elseif digests and ARGV[5] ~= '' and string.find(digests, ' ' .. ARGV[5], 1, true) then
    passed[#passed + 1] = id
  elseif known[2] and not known[4] and not is_elsewhere(known[1], 'pending') then
    local fence = (fence_of(known[3]) or 0) + 1
    call('HSET', key, 'fence', fence, 'state', 'active', 'worker', ARGV[4])
    call('HDEL', key, 'pending_since', 'cancel')
    taken[#taken + 1] = id
    leases[2 * #taken - 1], leases[2 * #taken] = now + ARGV[3], id
    held[2 * #taken - 1], held[2 * #taken] = id, fence
  end
end

-- Call a function until it passes over nothing more, then return what was passed over to its place.
local function until_none_is_passed(take_some)
  local from = #passed
  repeat
    local before = #left + #passed
    take_some(wanted - #taken)
  until #taken >= wanted or #left + #passed == before or #left >= MOST_LEFT or #passed >= MOST_PASSED
  for i = #passed, from + 1, -1 do
    local score = scores[passed[i]]
    if score then call('ZADD', KEYS[2], score, passed[i]) else call('RPUSH', KEYS[1], passed[i]) end
  end
end

local function take_pending(missing)
  for _, id in ipairs(call('RPOP', KEYS[1], missing) or {}) do take(id) end
end

local function take_priority(low, high)
  until_none_is_passed(function(missing)
    local found = call('ZRANGEBYSCORE', KEYS[2], low, high, 'WITHSCORES', 'LIMIT', 0, missing)
    local ids = {}
    for i = 1, #found, 2 do ids[#ids + 1], scores[found[i]] = found[i], found[i + 1] end
    if #ids > 0 then call('ZREM', KEYS[2], unpack(ids)) end
    for _, id in ipairs(ids) do take(id) end
  end)
end

-- Return the first plain tasks of a level, the next one first.
local function plain_of(level, low, missing)
  if level ~= 0 then return call('ZRANGEBYSCORE', KEYS[2], low, low, 'LIMIT', 0, missing) end
  local found, ids = call('LRANGE', KEYS[1], -missing, -1), {}
  for i = #found, 1, -1 do ids[#ids + 1] = found[i] end
  return ids
end

-- Take tasks of one priority in the order of their tags. The next plain task got its tag when it was first seen here.
local function take_level(level)
  local low, high, line = string.format('%d', level), string.format('(%d', level + 1), line_of(level, '')
  local clock = clock_of(places, level)
  local next_plain = tag_of(call('ZSCORE', KEYS[8], line), level)
  local served, is_left_plain, is_passed_plain = clock, true, false
  until_none_is_passed(function(missing)
    local plain = plain_of(level, low, missing)
    -- What has the score 0 was put there by another program, for pending has those of priority 0.
    local fair = call('ZRANGEBYSCORE', KEYS[2], level == 0 and low or '(' .. low, high, 'WITHSCORES', 'LIMIT', 0, missing)
    next_plain = next_plain or clock + PLAIN_STEP
    local of_plain, of_fair, ids = 0, 0, {}
    while #taken < wanted and (of_plain < #plain or 2 * of_fair < #fair) do
      local before, score = #taken, fair[2 * of_fair + 2]
      local tag = score and (tag_of(score, level) or LAST_TAG)
      -- Where tags have come to their end, they say nothing of the order.
      local is_first = tag and (tag < next_plain or next_plain >= LAST_TAG and (now + #taken) % 2 == 0)
      if is_first or of_plain == #plain then
        local id = fair[2 * of_fair + 1]
        of_fair, ids[#ids + 1], scores[id] = of_fair + 1, id, score
        take(id)
      else
        of_plain, tag = of_plain + 1, next_plain
        local id = plain[of_plain]
        if level ~= 0 then ids[#ids + 1], scores[id] = id, low end
        local passed_before = #passed
        take(id)
        if #taken > before then next_plain = next_plain + PLAIN_STEP end
        is_passed_plain = is_passed_plain or #passed > passed_before
      end
      if #taken > before then served = math.max(served, tag) end
    end
    is_left_plain = of_plain < #plain or #plain == missing
    if level == 0 and of_plain > 0 then call('RPOP', KEYS[1], of_plain) end
    if #ids > 0 then call('ZREM', KEYS[2], unpack(ids)) end
  end)
  if served > clock then call('ZADD', KEYS[8], score_of(level, served), string.format('%d', level)) end
  -- When the last plain task is taken, the next to come gets a tag of its own time.
  if is_left_plain or is_passed_plain then
    call('ZADD', KEYS[8], score_of(level, next_plain), line)
  else
    call('ZREM', KEYS[8], line)
  end
end

local function take_fairly()
  local low, had_pending = '-inf', false
  while #taken < wanted do
    local first = call('ZRANGEBYSCORE', KEYS[2], low, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    local level = first and math.floor(tonumber(first))
    if not had_pending and (not level or level >= 0) then level, had_pending = 0, true end
    -- No priority of ours has such a score.
    if level and level < -MOST_PRIORITY then
      take_priority('-inf', '(-100')
      low = '-100'
    elseif level and level <= MOST_PRIORITY then
      take_level(level)
      low = string.format('%d', level + 1)
    else
      if level then take_priority('101', '+inf') end
      return
    end
  end
end

local has_priorities = call('EXISTS', KEYS[2]) == 1
local is_fair = has_priorities and (call('EXISTS', KEYS[8]) == 1 or call('ZCOUNT', KEYS[2], '(0', '(1') > 0)
if is_fair then
  take_fairly()
else
  if has_priorities then take_priority('-inf', '(0') end
  if #taken < wanted then until_none_is_passed(take_pending) end
  if has_priorities and #taken < wanted then take_priority('0', '+inf') end
end
if #left > 0 then call('LPUSH', KEYS[1], unpack(left)) end
local is_left = #left + #passed > 0
local is_drained = #taken < wanted and not is_left
local is_empty = (is_fair or not is_drained) and call('EXISTS', KEYS[1], KEYS[2]) == 0
-- What comes next is numbered anew.
if is_fair and is_empty then call('DEL', KEYS[8]) end
is_empty = is_empty or is_drained
if is_empty then call('DEL', KEYS[7]) end
if #taken == 0 then return {is_left and 'left' or 'taken'} end
if not is_empty and call('EXISTS', KEYS[7]) == 0 then wake(KEYS[7], 1) end
call('LPUSH', KEYS[3], unpack(taken))
call('ZADD', KEYS[4], unpack(leases))
call('HSET', KEYS[6], unpack(held))
return {is_left and 'more' or 'taken', unpack(held)}
