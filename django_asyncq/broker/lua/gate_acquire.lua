-- Admit tasks to a gate that has at most `limit` members: first those that have waited longest.
-- KEYS: 1 gate (zset: id -> expiry, Unix seconds), 2 meta (hash: built, limit, expected_seconds, asked, kept,
--       own_limit, paused), 3 retaken (hash: id -> fence), 4 waiters (zset: id -> place), 5 ours (set of ids)
-- ARGV: 1 seconds to hold a slot (0: the full time), 2 limit if meta has none ("": none), 3 expected seconds if meta
--       has none, 4 "all", "partial" or "wait" (partial, and refused tasks wait), 5 seconds without a request after
--       which the gate must be rebuilt, 6 seconds for which the order of the waiters is kept after the last look at
--       them, 7 how many tasks may wait, with "all" and "partial" ("": no new one); then for each task: id, fence of
--       the run before the retry ("": not a retry), priority
-- Returns: {word, limit, occupancy, expected seconds, waiters before, how many of the following wait now, id without a
--       slot…}. Words: "unbuilt" (build it, ask again), "undefined" (no limit), "open" (limit 0 or less), "admitted";
--       with "all", if some task has neither slot nor place: "full", "paused".
-- Invariant: after an admission the gate has at most `limit` members; a paused gate gets no new one. No slot gets
--       shorter. While the order is kept, free slots belong to the waiters that are next. Admitted ids are noted as ours.
local gate, meta, waiters = KEYS[1], KEYS[2], KEYS[4]
local time = call('TIME')
local now = tonumber(time[1])
-- First: if the gate is no zset, it is set aside here, and has to be built.
call('ZREMRANGEBYSCORE', gate, '-inf', now)
local known = call('HMGET', meta, 'built', 'limit', 'expected_seconds', 'asked', 'kept', 'paused')
local limit = whole(known[2] or ARGV[2])
local expected = seconds_of(known[3]) and known[3] or ARGV[3]
local is_stale = now - (past(known[4], now) or 0) > tonumber(ARGV[5])
-- If stale, Redis may have been unreachable: slots of committed rows may have expired before they could be confirmed.
if not known[1] or known[2] and not limit or limit and limit > 0 and is_stale then
  call('HDEL', meta, 'built')
  return {'unbuilt', 0, 0, '0', 0, 0}
end
local paused, free = known[6] and 'paused', 0
if not paused and (limit or 0) <= 0 then
  -- Whoever waited for a slot needs none now.
  for i = 8, ARGV[4] == 'wait' and #ARGV or 0, 3 do call('ZREM', waiters, ARGV[i]) end
  return {limit and 'open' or 'undefined', limit or 0, 0, expected, 0, 0}
end
local full_seconds = math.min(math.max(math.ceil(10 * expected), 3600), 86400)
local hold = ARGV[1] == '0' and full_seconds or tonumber(ARGV[1])

local alive, waiting, ids = call('ZCARD', gate), call('ZCARD', waiters), {}
-- What may wait itself never overtakes.
local in_order = waiting > 0 and (ARGV[7] ~= '' or now - (past(known[5], now) or 0) <= tonumber(ARGV[6]))
for i = 8, #ARGV, 3 do ids[#ids + 1] = ARGV[i] end
if not paused then free = math.max(limit - alive, 0) end
local scores, behind = call('ZMSCORE', gate, unpack(ids)), in_order and waiting or 0
local refused, priorities, held, fresh, retaken, inside = {}, {}, {}, {}, {}, {}
for n, id in ipairs(ids) do
  local place = not scores[n] and in_order and call('ZRANK', waiters, id)
  if not scores[n] and not place then place, behind = behind, behind + 1 end
  if scores[n] or place < free then
    local slots, fence = scores[n] and held or fresh, ARGV[6 + 3 * n]
    slots[#slots + 1], slots[#slots + 2], inside[#inside + 1] = now + hold, id, id
    if fence ~= '' then retaken[#retaken + 1], retaken[#retaken + 2] = id, fence end
  else
    refused[#refused + 1], priorities[#priorities + 1] = id, ARGV[7 + 3 * n]
  end
end
limit = limit or 0
local joining = ARGV[4] == 'wait' and #refused or math.min(math.max((whole(ARGV[7]) or 0) - waiting, 0), #refused)
if ARGV[4] == 'all' and #refused > joining then
  return {paused or 'full', limit, alive, expected, in_order and waiting or 0, 0}
end
if tonumber(known[4]) ~= now then call('HSET', meta, 'asked', now) end
if #held > 0 then call('ZADD', gate, 'XX', 'GT', unpack(held)) end
if #fresh > 0 then call('ZADD', gate, unpack(fresh)) end
expire_later(gate, hold + 60)
if #retaken > 0 then call('HSET', KEYS[3], unpack(retaken)) end
expire_later(KEYS[3], full_seconds + 60)
note_ours(KEYS[5], inside)
if waiting > 0 and #inside > 0 then call('ZREM', waiters, unpack(inside)) end
if joining > 0 then wait_at(waiters, meta, {unpack(refused, 1, joining)}, priorities, time, ARGV[2]) end
return {'admitted', limit, alive + #fresh / 2, expected, waiting, joining, unpack(refused)}
