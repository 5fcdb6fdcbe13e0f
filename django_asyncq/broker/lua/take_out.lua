-- Take tasks out that wait, with their locks; ask the workers of running ones to stop. At most 50 a call.
-- KEYS: 1 pending, 2 priority, 3 scheduled, 4 retry, 5 archived, 6 completed, 7 lease, 8 groups, 9 due (ms), 10 suspects,
--       11 active, 12 fair
-- ARGV: 1 task key prefix, 2 group key prefix, 3 channel of requests to stop, 4 who may hold some of them, see `hold`,
--       5 "1": what waits is removed whatever its fence; then for each task: id, fence of its row or "" (only if it is
--       held), id of its row or ""
-- Returns one word for each: "removed", "active" (it stays, its lease too), "missing" (no hash, or one that names another
--       row) or "overtaken" (its fence is later than that of the row: it has been pushed or claimed since, or while the
--       row was changed; or it is not held: nothing is done).
-- Invariant: nothing is left of a removed task. What a worker has claimed, or another holder, stays until it is
--       reported, or its lease expires. A lock that another id holds stays. Pending may be long: it is searched only
--       when the hash says so, and from the oldest, or the removal of a long backlog would search all of it for each task.
local places = {priority = KEYS[2], fair = KEYS[12]}
local words = {}
-- Ask whoever runs a task to stop. A worker of ours is asked only if its run has read the row before it had this fence, for
-- the request may come after the task has begun anew. Ours alone run what no other program has enqueued.
local function ask(id, fence, is_ours)
  local request = fence ~= '' and id .. ' ' .. fence or id
  call('PUBLISH', ARGV[3], is_ours and request or id)
end

for i = 6, #ARGV, 3 do
  local id, key = ARGV[i], ARGV[1] .. ARGV[i]
  local known = call('HMGET', key, 'state', 'unique_key', 'group', 'waited', 'fence', 'worker', 'priority', 'fair')
  local is_held = ARGV[4] ~= '' and known[1] == 'active' and known[6] == ARGV[4]
  local is_leased = known[1] and not is_elsewhere(known[1], 'active') and (known[1] == 'active' or call('ZSCORE', KEYS[7], id))
  local highest = tonumber(ARGV[i + 1]) or is_held and LARGEST or -1
  if ARGV[5] == '1' and not is_leased then highest = LARGEST end
  if is_of_other(key, ARGV[i + 2]) then
    -- A worker may run it all the same.
    ask(id, ARGV[i + 1], true)
    words[#words + 1] = 'missing'
  elseif not known[1] and ARGV[i + 1] == '' then
    -- An earlier call, whose reply was lost, has taken it out.
    words[#words + 1] = 'missing'
  elseif (fence_of(known[5]) or 0) > highest then
    words[#words + 1] = 'overtaken'
  elseif is_leased and not is_held then
    if call('HEXISTS', key, 'msg') == 1 then call('HSET', key, 'cancel', ARGV[i + 1] ~= '' and ARGV[i + 1] or 1) end
    ask(id, ARGV[i + 1], known[6] or ARGV[i + 2] == '')
    words[#words + 1] = 'active'
  else
    local waited = call('ZREM', KEYS[2], id) + call('ZREM', KEYS[10], id)
    -- asynq's tools put tasks into pending whatever their priority.
    if known[1] == 'pending' and waited == 0 then call('LREM', KEYS[1], -1, id) end
    for zset = 3, 6 do call('ZREM', KEYS[zset], id) end
    if known[8] and (known[1] == 'pending' or is_held) then leave_line(places, known[7], known[8]) end
    call('ZREM', KEYS[9], id)
    if is_held then
      call('LREM', KEYS[11], 1, id)
      call('ZREM', KEYS[7], id)
    end
    if known[3] then
      local group = ARGV[2] .. known[3]
      if call('ZREM', group, id) == 1 and call('EXISTS', group) == 0 then call('SREM', KEYS[8], known[3]) end
    end
    announce_over(known[4], id)
    release_lock(known[2], id)
    local removed = call('DEL', key) == 1
    -- Redis was emptied: a worker may run it all the same, and the row no longer says so, so nobody asks it again.
    if not removed then ask(id, ARGV[i + 1], known[6] or ARGV[i + 2] == '') end
    words[#words + 1] = removed and 'removed' or 'missing'
  end
end
return words
