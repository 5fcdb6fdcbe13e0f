-- Wake an idle worker for each queue that has tasks and no token: other programs push without one, and one may be lost.
-- KEYS: for each queue: pending, priority, paused, tokens (see `waking.lua`)
-- ARGV: none
-- Returns how many queues got a token.
-- Invariant: a queue that is empty or paused gets none.
local woken = 0
for i = 1, #KEYS, 4 do
  if call('EXISTS', KEYS[i], KEYS[i + 1]) > 0 and call('EXISTS', KEYS[i + 2], KEYS[i + 3]) == 0 then
    -- At maxmemory, Redis refuses LPUSH unless the script has written before. DEL is never refused.
    call('DEL', KEYS[i + 3])
    wake(KEYS[i + 3], 1)
    woken = woken + 1
  end
end
return woken
