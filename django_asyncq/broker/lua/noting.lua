-- Note which members of a gate are tasks of this project; the scripts that add members begin with this.
-- KEYS and ARGV: those of the script that follows.
-- Returns nothing.
-- Invariant: no TTL gets shorter. The note outlasts the longest slot, which lasts for a day. A member that is not noted
--       belongs to another program.
local NOTED_SECONDS = 90000

local function expire_later(key, seconds)
  local ttl = call('TTL', key)
  if ttl ~= -2 and ttl < seconds then call('EXPIRE', key, seconds) end
end

local function note_ours(key, ids)
  for _, id in ipairs(ids) do call('SADD', key, id) end
  if #ids > 0 and call('TTL', key) < NOTED_SECONDS - 3600 then call('EXPIRE', key, NOTED_SECONDS) end
end
