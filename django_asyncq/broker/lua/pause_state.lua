-- Read whether a queue is paused, and because of which row.
-- KEYS: 1 paused (string), 2 mark (string: which row)
-- ARGV: none
-- Returns {"paused" or "", mark or ""}.
-- Invariant: both are of one moment.
return {call('GET', KEYS[1]) and 'paused' or '', call('GET', KEYS[2]) or ''}
