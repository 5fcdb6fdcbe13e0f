-- Wake idle workers: each that waits for pushes to a queue takes a token from a list, whoever has waited longest first.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing.
-- Invariant: a queue has at most 32 tokens, and they expire. They only wake: a worker that gets one looks for tasks. So
--       a token too many costs a look, and one that is lost is made up for within a second (`wake.lua`).
local MOST_TOKENS, TOKEN_SECONDS, TOKENS = 32, 300, string.rep('1', 32)

-- count: how many tasks have come.
local function wake(tokens, count)
  count = math.min(count, MOST_TOKENS)
  if count == 0 then return end
  local length = call('LPUSH', tokens, string.byte(TOKENS, 1, count))
  if length == count then call('EXPIRE', tokens, TOKEN_SECONDS) end
  if length > MOST_TOKENS then call('LTRIM', tokens, 0, MOST_TOKENS - 1) end
end
