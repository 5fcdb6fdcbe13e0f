-- Add up what was counted of the runs in a queue, as `count_runs` writes it.
-- KEYS: the hashes
-- ARGV: none
-- Returns a flat list: field, sum.
-- Invariant: nothing is written. What is no whole number is left out.
local sums, found = {}, {}
for _, key in ipairs(KEYS) do
  local flat = call('HGETALL', key)
  for index = 1, #flat, 2 do
    local count = whole(flat[index + 1])
    if count and count > 0 then sums[flat[index]] = (sums[flat[index]] or 0) + count end
  end
end
for name, sum in pairs(sums) do
  found[#found + 1], found[#found + 2] = name, string.format('%.0f', sum)
end
return found
