-- Release asynq's locks of unique tasks that are not enqueued after all.
-- KEYS: locks (strings: id of the task that holds it)
-- ARGV: for each lock: id
-- Returns nothing.
-- Invariant: a lock that another id holds stays.
for n, lock in ipairs(KEYS) do release_lock(lock, ARGV[n]) end
