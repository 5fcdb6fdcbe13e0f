-- Send commands, in every script: Redis may hold anything under our keys, and none of it may stop a script.
-- KEYS and ARGV: those of the script that follows. ODD_CHANNEL: `scripts.py` puts it before these functions.
-- Returns nothing. `call` sends a command. When its key has another type, the key is set aside: it is renamed, kept for
--       seven days and announced, and the command finds no key.
-- Invariant: nothing is lost: a key that is set aside can be read for seven days. It stays in its cluster slot.
local ODD_SECONDS = 604800

local function set_aside(key)
  local at = table.concat(redis.call('TIME'), '.')
  local head, rest = string.match(key, '^(.-{[^}]+}:?)(.*)$')
  local target = head and head .. 'odd:' .. at .. ':' .. rest or key .. ':odd:' .. at .. ':{' .. key .. '}'
  if redis.pcall('RENAME', key, target).err then redis.call('DEL', key) end
  redis.pcall('EXPIRE', target, ODD_SECONDS)
  -- If these were the slots of a gate, it must be built again before it admits.
  redis.pcall('HDEL', '{' .. key .. '}:meta', 'built')
  redis.pcall('PUBLISH', ODD_CHANNEL, target)
end

local send = redis.pcall

local function call(command, ...)
  local reply = send(command, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then set_aside((...)) end
  -- Any other error comes again, and ends the script in the way of this server's version.
  return redis.call(command, ...)
end
