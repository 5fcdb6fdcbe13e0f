-- Read which tasks wait for code that has them, and forget those that wait no more.
-- KEYS: 1 unknown, 2 scheduled
-- ARGV: 1 task key prefix
-- Returns for each label: the label, how many wait, since when the first of them waits (Unix seconds, "0": not known).
-- Invariant: of each label, the first MOST_LOOKED members are tasks that wait. Later ones may have ended since.
local MOST_LABELS, MOST_LOOKED = 100, 100
local found, from = {}, '-'
for _ = 1, MOST_LABELS do
  local first = call('ZRANGEBYLEX', KEYS[1], from, '+', 'LIMIT', 0, 1)[1]
  local label = first and string.match(first, '^([^\n]*)\n')
  if not label then
    if first then call('ZREM', KEYS[1], first) else break end
  else
    local low, high = '[' .. label .. '\n', '(' .. label .. '\n\255'
    local since
    for _, member in ipairs(call('ZRANGEBYLEX', KEYS[1], low, high, 'LIMIT', 0, MOST_LOOKED)) do
      local id = string.sub(member, #label + 2)
      local known = call('HMGET', ARGV[1] .. id, 'state', 'parked_at')
      if known[1] == 'scheduled' and known[2] and call('ZSCORE', KEYS[2], id) then
        since = since or whole(known[2]) or 0
      else
        call('ZREM', KEYS[1], member)
      end
    end
    local count = call('ZLEXCOUNT', KEYS[1], low, high)
    if count > 0 then
      found[#found + 1], found[#found + 2], found[#found + 3] = label, count, since or 0
    end
    from = high
  end
end
return found
