-- Add up the counters of some hours, as `done`, `retry` and `archive` write them, over equal parts of each hour.
-- KEYS: the hashes of the hours
-- ARGV: how many minutes a part has; they divide 60
-- Returns a list for each hour: processed, failed of each part; -1 for both where no minute was counted.
-- Invariant: nothing is written.
local minutes = tonumber(ARGV[1])
local P, F, LARGEST = string.byte('p'), string.byte('f'), 2 ^ 53
local hours = {}
for _, key in ipairs(KEYS) do
  local sums = {}
  for part = 1, 60 / minutes do
    sums[2 * part - 1], sums[2 * part] = -1, -1
  end
  local flat = call('HGETALL', key)
  for index = 1, #flat, 2 do
    local letter, minute = string.byte(flat[index]), tonumber(string.sub(flat[index], 2))
    local place = letter == P and 0 or letter == F and 1
    local count = tonumber(flat[index + 1])
    -- Not what another program has written there: no minute, no number, nan.
    if place and minute and minute >= 0 and minute < 60 and count and count >= 0 and count < LARGEST then
      local at = 2 * math.floor(minute / minutes) + 1
      if sums[at] < 0 then sums[at], sums[at + 1] = 0, 0 end
      sums[at + place] = math.min(sums[at + place] + count, LARGEST)
    end
  end
  hours[#hours + 1] = sums
end
return hours
