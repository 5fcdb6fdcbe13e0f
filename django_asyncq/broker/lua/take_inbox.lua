-- Take documents out of an inbox, each under an id of its own, and those that were taken long ago and are not settled.
-- KEYS: 1 inbox (list), 2 taken (hash: id → document), 3 due (zset: id; score = Unix milliseconds when to take it again)
-- ARGV: 1 largest document in bytes, 2 bytes after which the reply is full, 3 milliseconds until a document is taken
--       again, 4 most documents to take again, 5 "1" if the inbox is a list of another program's naming, else "",
--       then one id for each new document
-- Returns {how many documents are left in the inbox, id, document, …}, those that are taken again first.
--       An error if such a list has another type: what is not under our prefix is not set aside.
-- Invariant: each document is either in the inbox or in `taken` under one id, so a document that is read twice has the
--       same id. A larger document is cut to one byte more than the largest.
local inbox, taken, due = KEYS[1], KEYS[2], KEYS[3]
local largest, full, pause_ms, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[5] == '1' then
  local kind = call('TYPE', inbox).ok
  if kind ~= 'list' and kind ~= 'none' then return redis.error_reply('WRONGTYPE it is no list, but a ' .. kind) end
end
local again = string.format('%.0f', now + pause_ms)
local reply, size = {call('LLEN', inbox)}, 0

local function add(id, document)
  call('ZADD', due, again, id)
  reply[#reply + 1] = id
  reply[#reply + 1] = document
  size = size + #document
end

-- A document without a time, because another program has removed it, is due now.
if call('HLEN', taken) > call('ZCARD', due) then
  for _, id in ipairs(call('HKEYS', taken)) do
    if not call('ZSCORE', due, id) then call('ZADD', due, 0, id) end
  end
end

for _, id in ipairs(call('ZRANGEBYSCORE', due, '-inf', string.format('%.0f', now), 'LIMIT', 0, most)) do
  local document = call('HGET', taken, id)
  if not document then
    call('ZREM', due, id)
  elseif size < full then
    add(id, document)
  end
end
for i = 6, #ARGV do
  local document = size < full and call('RPOP', inbox)
  if not document then break end
  document = string.sub(document, 1, largest + 1)
  call('HSET', taken, ARGV[i], document)
  add(ARGV[i], document)
  reply[1] = reply[1] - 1
end
return reply
