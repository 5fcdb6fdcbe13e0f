-- Keep groups of tasks that run together; the scripts that add to groups, and those that look for members, begin with it.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing. rules: "<size> <within ms> <quiet ms>", "" for a group of another program, which we never take; in
--       group-rules, the Unix ms of the first member follow. places: the keys of groups, group-due and group-rules.
-- Invariant: a group with members is named in the groups set; one of ours is in group-due with the time of its ripeness.
local function rules_of(text)
  local size, within, quiet, first = string.match(text or '', '^(%d+) (%d+) (%d+) ?(%d*)$')
  size, within, quiet = whole(size), whole(within), whole(quiet)
  if not (size and within and quiet) then return nil end
  return size, within, quiet, whole(first)
end

-- Return the ms at which a group is ripe: it is full, or its first member has waited long enough, or no new one came.
local function ripe_at(count, size, within, quiet, first, now)
  if count >= size then return now end
  return math.min(first + within, quiet > 0 and now + quiet or math.huge)
end

-- Add a task; return whether somebody must look at the group sooner than before.
local function join_group(places, prefix, group, id, rules, time)
  local key, now = prefix .. group, time[1] * 1000 + math.floor(time[2] / 1000)
  call('ZADD', key, time[1], id)
  call('SADD', places.groups, group)
  local size, within, quiet = rules_of(rules)
  if not size then return false end
  local count = call('ZCARD', key)
  local _, _, _, known = rules_of(call('HGET', places.rules, group))
  local first = count > 1 and known and known <= now and known or now
  call('HSET', places.rules, group, string.format('%d %d %d %.0f', size, within, quiet, first))
  call('ZADD', places.due, string.format('%.0f', ripe_at(count, size, within, quiet, first, now)), group)
  return count == 1 or count >= size
end

-- Whether a task is in its group, or in a set that was taken of a group. sets: the key of the aggregation sets.
local function is_in_group(sets, prefix, group, id)
  if group and call('ZSCORE', prefix .. group, id) then return true end
  for _, key in ipairs(call('ZRANGE', sets, 0, 199)) do
    if string.sub(key, 1, #prefix) == prefix and call('ZSCORE', key, id) then return true end
  end
  return false
end
