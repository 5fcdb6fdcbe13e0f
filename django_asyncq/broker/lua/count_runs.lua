-- Count runs by the names of their tasks, in the totals of a queue and in those of an hour.
-- KEYS: 1 totals, 2 those of the hour (hashes: "<what> <name>" -> count; "= <name>" -> 1 for each name, "=" -> how many)
-- ARGV: 1 most names, 2 name of all others, 3 when the hour's hash expires (Unix seconds), then for each task: name,
--       how many words follow, then what and count in turn
-- Returns nothing.
-- Invariant: a hash has at most so many names, and one for all others. A field that is no whole number begins again
--       with its whole hash, see `counters`.
local function name_in(key, name)
  if call('HEXISTS', key, '= ' .. name) == 1 then return name end
  if (whole(call('HGET', key, '=')) or 0) >= tonumber(ARGV[1]) then return ARGV[2] end
  add_to_minute(key, '=', 1)
  call('HSET', key, '= ' .. name, 1)
  return name
end

local i = 4
while i < #ARGV do
  local name, words = ARGV[i], tonumber(ARGV[i + 1])
  for _, key in ipairs(KEYS) do
    local counted_as = name_in(key, name)
    for j = i + 2, i + words, 2 do add_to_minute(key, ARGV[j] .. ' ' .. counted_as, ARGV[j + 1]) end
  end
  i = i + 2 + words
end
call('EXPIREAT', KEYS[2], ARGV[3])
