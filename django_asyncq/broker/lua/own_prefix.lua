-- Note a supervisor of the database that owns a prefix; give the prefix to a database that may have it.
-- KEYS: 1 owner (string: identity of a database), 2 supervisors (zset; score = Unix ms until which one counts as alive)
-- ARGV: 1 identity of the caller's database, 2 token of the caller's supervisor ("": none), 3 ms for which it counts as
--       alive, 4 "1" if it may take a prefix without an owner, 5 when it may take that of another: "never", "unused"
--       (no supervisor of the other is alive) or "always"
-- Returns {owner now ("": none), owner before, how many supervisors of the owner before were alive}.
-- Invariant: at any time one database owns the prefix, and only its supervisors are noted: those that live, and for an
-- hour those that died without a word, so that an alert can name them.
local KEPT_MS = 3600000
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local before = call('GET', KEYS[1]) or ''
-- What is no identity is as good as none.
if #before ~= 36 or not string.match(before, '^[0-9a-f-]+$') then before = '' end
call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - KEPT_MS)
local alive = #call('ZRANGE', KEYS[2], string.format('(%.0f', now), '+inf', 'BYSCORE')
local owner, takes = before, false
if before == '' then
  takes = ARGV[4] == '1'
elseif before ~= ARGV[1] then
  takes = ARGV[5] == 'always' or (ARGV[5] == 'unused' and alive == 0)
end
if takes then
  call('DEL', KEYS[2])
  call('SET', KEYS[1], ARGV[1])
  owner = ARGV[1]
end
if owner == ARGV[1] and ARGV[2] ~= '' then
  call('ZADD', KEYS[2], string.format('%.0f', now + ARGV[3]), ARGV[2])
end
return {owner, before, alive}
