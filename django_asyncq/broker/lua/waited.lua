-- Announce a task that is over to the processes that wait for it; each script that removes or archives one begins with it.
-- KEYS and ARGV: those of the script that follows. OVER_CHANNEL: `scripts.py` puts it before these functions.
-- Returns nothing. waited: field of the task's hash, which `mark_waited` has set.
-- Invariant: a task that nobody waits for costs no command. A lack of rights stops no script: who waits reads the row.
local function announce_over(waited, id)
  if waited then redis.pcall('PUBLISH', OVER_CHANNEL, id) end
end
