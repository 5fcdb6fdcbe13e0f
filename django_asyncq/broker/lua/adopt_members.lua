-- Name the rows of taken members of other programs, before the rows are inserted.
-- KEYS: 1 the taken set
-- ARGV: 1 task key prefix, then for each task: id, id of its new row, a content of its field `row` that is no row of it
--       ("": none)
-- Returns for each: the id of its row; "" when it is not in the set any more (nothing changed).
-- Invariant: a row that was named once stays, so the next one who takes the member finds it.
local reply = {}
for i = 2, #ARGV, 3 do
  local id, row, wrong = unpack(ARGV, i, i + 2)
  local key, named = ARGV[1] .. id, ''
  if call('ZSCORE', KEYS[1], id) then
    local known = call('HMGET', key, 'msg', 'state', 'row')
    if known[1] and not is_elsewhere(known[2], 'aggregating') then
      named = known[3] and known[3] ~= wrong and known[3] or row
      call('HSET', key, 'row', named)
    end
  end
  reply[#reply + 1] = named
end
return reply
