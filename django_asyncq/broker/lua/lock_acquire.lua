-- Take a lock: free, already mine, or held by the owner that is known to be dead.
-- KEYS: 1 lock (string: the owner's value)
-- ARGV: 1 my value, 2 TTL in ms, 3 value of a dead owner, or ""
-- Returns {"held"} or {"taken", value of its owner}.
-- Invariant: a lock is only taken from an owner whose exact value was judged dead, never by age.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] and (ARGV[3] == '' or owner ~= ARGV[3]) then return {'taken', owner} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'held'}
