-- Admit tasks that need a slot of one gate, or of each of several: a task gets all its slots or none, first those that
--       have waited longest.
-- KEYS: for each gate: 1 members (zset: id -> expiry, Unix seconds), 2 meta (hash: built, limit, expected_seconds,
--       asked, kept, own_limit, paused), 3 retaken (hash: id -> fence), 4 waiters (zset: id -> place), 5 ours (set of
--       ids)
-- ARGV: 1 seconds to hold a slot (0: the full time), 2 "all", "partial" or "wait" (partial, and refused tasks wait),
--       3 seconds without a request after which a gate must be rebuilt, 4 seconds for which the order of the waiters is
--       kept after the last look at them, 5 how many tasks may wait, with "all" and "partial" ("": no new one), 6 number
--       of gates; for each gate: limit if meta has none ("": none), expected seconds if meta has none; then for each
--       task: id, fence of the run before the retry ("": not a retry), priority, its place in the line of a gate that
--       is not among these ("": none)
-- Returns: {word, number of the gate that it is about, limit, occupancy, expected seconds, waiters before, then for each
--       task without a slot: id, number of the gate that refused it, "1" if it waits there now or "0"}. Words:
--       "unbuilt" (build it, ask again), "undefined" (no limit), "open" (no gate has a limit above 0), "admitted"; with
--       "all", if some task has neither slots nor place: "full", "paused".
-- Invariant: after an admission each gate has at most `limit` members; a paused gate gets no new one. No slot gets
--       shorter. While the order is kept, free slots belong to the waiters that are next; what waits at one of the gates
--       has at the others the place of its score. A refused task has no slot, and waits in one line at most. Admitted
--       ids are noted as ours.
local time = call('TIME')
local now, mode, most, waits = tonumber(time[1]), ARGV[2], ARGV[5], ARGV[2] == 'wait'
local gates, limited, ids, first = {}, {}, {}, 7 + 2 * ARGV[6]
for i = first, #ARGV, 4 do ids[#ids + 1] = ARGV[i] end
for number = 1, tonumber(ARGV[6]) do
  local members, meta, retaken, waiters, ours = unpack(KEYS, 5 * number - 4, 5 * number)
  -- First: if the gate is no zset, it is set aside here, and has to be built.
  call('ZREMRANGEBYSCORE', members, '-inf', now)
  local known = call('HMGET', meta, 'built', 'limit', 'expected_seconds', 'asked', 'kept', 'paused')
  local own_limit = ARGV[5 + 2 * number]
  local limit = whole(known[2] or own_limit)
  local is_stale = now - (past(known[4], now) or 0) > tonumber(ARGV[3])
  -- If stale, Redis may have been unreachable: slots of committed rows may have expired before they could be confirmed.
  if not known[1] or known[2] and not limit or limit and limit > 0 and is_stale then
    call('HDEL', meta, 'built')
    return {'unbuilt', number, 0, 0, '0', 0}
  end
  local expected = seconds_of(known[3]) and known[3] or ARGV[6 + 2 * number]
  local full_seconds = math.min(math.max(math.ceil(10 * expected), 3600), 86400)
  gates[number] = {
    full_seconds = full_seconds, hold = ARGV[1] == '0' and full_seconds or tonumber(ARGV[1]),
    number = number, members = members, meta = meta, retaken = retaken, waiters = waiters, ours = ours,
    limit = limit, own_limit = own_limit, asked = known[4], kept = known[5], paused = known[6] and 'paused',
    expected = expected,
    held = {}, fresh = {}, again = {}, inside = {}, dropped = {}, joining = {}, priorities = {}, since = {}, behind = 0,
  }
end
for number, gate in ipairs(gates) do
  if gate.paused or (gate.limit or 0) > 0 then
    limited[#limited + 1] = gate
  else
    -- Whoever waited for a slot needs none now.
    for _, id in ipairs(waits and ids or {}) do call('ZREM', gate.waiters, id) end
    if not gate.limit then return {'undefined', number, 0, 0, gate.expected, 0} end
  end
end
if #limited == 0 then return {'open', 1, gates[1].limit, 0, gates[1].expected, 0} end

for _, gate in ipairs(limited) do
  gate.alive, gate.waiting = call('ZCARD', gate.members), call('ZCARD', gate.waiters)
  gate.room = math.max((whole(most) or 0) - gate.waiting, 0)
  -- What may wait itself never overtakes.
  gate.in_order = gate.waiting > 0 and (most ~= '' or now - (past(gate.kept, now) or 0) <= tonumber(ARGV[4]))
  gate.free = gate.paused and 0 or math.max(gate.limit - gate.alive, 0)
  gate.left = gate.free
  gate.scores = call('ZMSCORE', gate.members, unpack(ids))
end

-- Return the score of a task in a line, and the gate of that line, if it is one of several.
local function standing(n)
  for _, gate in ipairs(#gates > 1 and limited or {}) do
    local score = gate.waiting > 0 and call('ZSCORE', gate.waiters, ids[n])
    if score then return score, gate end
  end
  return ARGV[first + 4 * n - 1] ~= '' and ARGV[first + 4 * n - 1]
end

-- Return the place of a task before the free slots of a gate, and whether it is behind all that wait there.
local function place_at(gate, n, score)
  if not gate.in_order then return gate.free - gate.left end
  local rank = call('ZRANK', gate.waiters, ids[n])
  if rank then return rank end
  if score then return call('ZCOUNT', gate.waiters, '-inf', '(' .. score) end
  return gate.waiting + gate.behind, true
end

local refused, refusing = {}, nil
for n, id in ipairs(ids) do
  local score, line = standing(n)
  local by, last = nil, {}
  for _, gate in ipairs(limited) do
    if not gate.scores[n] then
      local place, is_last = place_at(gate, n, score)
      last[gate] = is_last
      if gate.left < 1 or place >= gate.free then
        -- The one where it stands, or else the narrowest.
        local width = gate == line and -1 or gate.paused and 0 or gate.limit
        if not by or width < by.width then by, gate.width = gate, width end
      end
    end
  end
  for _, gate in ipairs(limited) do
    if by then
      if gate.scores[n] then gate.dropped[#gate.dropped + 1] = id end
    else
      local slots, fence = gate.scores[n] and gate.held or gate.fresh, ARGV[first + 4 * n - 3]
      slots[#slots + 1], slots[#slots + 2], gate.inside[#gate.inside + 1] = now + gate.hold, id, id
      if fence ~= '' then gate.again[#gate.again + 1], gate.again[#gate.again + 2] = id, fence end
      if not gate.scores[n] then gate.left = gate.left - 1 end
      if last[gate] then gate.behind = gate.behind + 1 end
    end
  end
  if by then
    local joins = waits or by.room > 0
    if joins then
      by.room = by.room - 1
      local to = #by.joining + 1
      by.joining[to], by.priorities[to], by.since[to] = id, ARGV[first + 4 * n - 2], score or false
    else
      refusing = refusing or by
    end
    refused[#refused + 1], refused[#refused + 2], refused[#refused + 3] = id, by.number, joins and '1' or '0'
  end
end
if mode == 'all' and refusing then
  local waiting = refusing.in_order and refusing.waiting or 0
  return {refusing.paused or 'full', refusing.number, refusing.limit or 0, refusing.alive, refusing.expected, waiting}
end
for _, gate in ipairs(limited) do
  if tonumber(gate.asked) ~= now then call('HSET', gate.meta, 'asked', now) end
  if #gate.held > 0 then call('ZADD', gate.members, 'XX', 'GT', unpack(gate.held)) end
  if #gate.fresh > 0 then call('ZADD', gate.members, unpack(gate.fresh)) end
  expire_later(gate.members, gate.hold + 60)
  if #gate.again > 0 then call('HSET', gate.retaken, unpack(gate.again)) end
  expire_later(gate.retaken, gate.full_seconds + 60)
  note_ours(gate.ours, gate.inside)
  if gate.waiting > 0 and #gate.inside > 0 then call('ZREM', gate.waiters, unpack(gate.inside)) end
  -- It had lost its slot of another gate.
  for _, id in ipairs(gate.dropped) do
    call('ZREM', gate.members, id)
    call('SREM', gate.ours, id)
  end
  if #gate.joining > 0 then
    wait_at(gate.waiters, gate.meta, gate.joining, gate.priorities, time, gate.own_limit, false, gate.since)
    for _, other in ipairs(limited) do
      if other ~= gate and other.waiting > 0 then call('ZREM', other.waiters, unpack(gate.joining)) end
    end
  end
end
local about = limited[1]
return {'admitted', about.number, about.limit or 0, about.alive + #about.fresh / 2, about.expected, about.waiting, unpack(refused)}
