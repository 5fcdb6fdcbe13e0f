-- Read what Redis holds in fields: any program may have written anything there. Scripts begin with those they use.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing. Each function answers nil to what it cannot read.
-- Invariant: no function raises an error.
-- A larger fence, after the year 2255, was not made here, and Lua would round it.
local LARGEST = 9e15
local STATES = ' pending active scheduled retry archived completed aggregating '

-- Return a whole number, or nil.
local function whole(text, largest)
  local found = text and #text < 21 and string.find(text, '^-?%d+$') and tonumber(text)
  return found and math.abs(found) <= (largest or LARGEST) and found or nil
end

-- Return a time that is over, or nil. now: in the same unit. Below: seconds, with fractions.
local function past(text, now)
  local found = whole(text, 1e19)
  return found and found >= 0 and found <= now and found or nil
end

local function seconds_of(text)
  local found = tonumber(text or '')
  return found and found >= 0 and found <= 1e9 and found or nil
end
local function fence_of(text)
  local found = whole(text)
  return found and found >= 0 and found or nil
end

-- Return a score that is a time, or nil: nobody waits beyond the year 9999.
local function dated(score)
  return score and tonumber(score) <= 253402300799 and score or nil
end

local function is_state(word)
  return word and string.find(word, '^%l+$') and string.find(STATES, ' ' .. word .. ' ', 1, true)
end

-- An unreadable state may stand for any; the list that holds the id then decides.
local function is_elsewhere(word, place)
  return word ~= place and is_state(word)
end

-- The name of a lock comes from a hash, so the key may be any program's: it is never set aside.
local function release_lock(lock, id)
  if lock and redis.pcall('GET', lock) == id then redis.call('DEL', lock) end
end

-- What `settled` says now: "" when another program has written a retry since, which then has another time.
local function settled_of(settled, state, score)
  local due = settled and string.match(settled, '^retry (.*)$')
  local is_others = due and state == 'retry' and tonumber(due) ~= tonumber(score or '')
  return is_others and '' or due and 'retry' or settled or ''
end
