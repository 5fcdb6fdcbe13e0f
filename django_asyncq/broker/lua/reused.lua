-- Distinguish entries whose ids other programs use again; the scripts that push or remove begin with this.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing.
-- Invariant: our own ids are never used again: their hashes name no row.

-- Return whether a hash is that of another task. row: "", or the row that the task's hash names: its id is one that
-- other programs may use again.
local function is_of_other(key, row)
  return row ~= '' and call('HEXISTS', key, 'msg') == 1 and call('HGET', key, 'row') ~= row
end

-- Return whether a task that is pushed again may leave where it is. place: state → zset of what it may leave.
local function may_leave(place, state, key, row)
  return (place[state] or not is_state(state)) and not is_of_other(key, row)
end

-- Take an id out of its zset; of an unreadable state, out of all. due: the zset of times between two seconds.
local function leave(place, due, state, id)
  for _, zset in pairs(place[state] and {place[state]} or place) do call('ZREM', zset, id) end
  call('ZREM', due, id)
end
