-- Forget documents that are tasks now, and keep those that can be none for people to look at.
-- KEYS: 1 taken (hash: id → document), 2 due (zset of ids), 3 rejected (list)
-- ARGV: 1 most rejected documents to keep, 2 seconds to keep them, then for each document: its id, and what is kept of
--       it if it is rejected, else ''
-- Returns one word for each: "enqueued", "rejected" or "missing" (it was settled before; nothing changed).
-- Invariant: a document is rejected once, however often this is called; the newest ones are kept.
local taken, due, rejected = KEYS[1], KEYS[2], KEYS[3]
local words = {}
for i = 3, #ARGV, 2 do
  local id, kept = ARGV[i], ARGV[i + 1]
  call('ZREM', due, id)
  if call('HDEL', taken, id) == 0 then
    words[#words + 1] = 'missing'
  elseif kept == '' then
    words[#words + 1] = 'enqueued'
  else
    call('LPUSH', rejected, kept)
    words[#words + 1] = 'rejected'
  end
end
call('LTRIM', rejected, 0, ARGV[1] - 1)
call('EXPIRE', rejected, ARGV[2])
return words
