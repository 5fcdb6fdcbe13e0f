-- Acquire a lock that is free, already mine, or held by an owner that is known to be dead.
-- KEYS: 1 lock (string: the owner's value)
-- ARGV: 1 my value, 2 TTL in ms, 3 value of a dead owner, or ""
-- Returns {"held"}, or {"taken", value of its owner} with nothing changed.
-- Invariant: a lock is taken only from an owner whose exact value was proved dead, never because of its age.
local lock = KEYS[1]
local mine, ttl_ms, dead = ARGV[1], ARGV[2], ARGV[3]

local owner = call('GET', lock)
-- Every lock of ours expires: a value that is not ours either would be taken for ever.
if owner and not string.find(owner, '^[^|]*|[^|]*|%d*|[^|]*|%d+$') and call('PTTL', lock) == -1 then
  set_aside(lock)
  owner = nil
end
if owner and owner ~= mine and (dead == '' or owner ~= dead) then return {'taken', owner} end

call('SET', lock, mine, 'PX', ttl_ms)
return {'held'}
