"""What runs inside Redis, in Lua: each script touches one pool's keys, which share a hash tag and thereby a node.

All are sent as text (EVAL): Redis compiles a text once, and nothing needs to be loaded again after a restart, a
failover or SCRIPT FLUSH. Replies are errors where Redis refused a write; a key of another type than ours is mended,
since keys under our name are ours.
"""

from typing import Final

_BEGIN: Final = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function is_of_another_type(reply)
  return type(reply) == 'table' and reply.err and string.find(reply.err, 'WRONGTYPE', 1, true)
end
"""

HEAR: Final = (
    _BEGIN
    + """
-- KEYS: the stream, then session keys. ARGV: command, from, to, count, the cursor's milliseconds.
local mended, newest = 0, ''
local entries = redis.pcall(ARGV[1], KEYS[1], ARGV[2], ARGV[3], 'COUNT', ARGV[4])
if is_of_another_type(entries) then
  -- A replica cannot; the next publication will.
  redis.pcall('DEL', KEYS[1])
  mended, entries = 1, {}
end
if entries.err then return entries end
if #entries == 0 and tonumber(ARGV[5]) > now_ms then
  -- The cursor is of a clock that was ahead. Unless the stream is as well, its entries would never be heard.
  local last = redis.pcall('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
  newest = #last > 0 and last[1][1] or '0-0'
end
local bindings = {}
for i = 2, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if is_of_another_type(value) then value = '' end
  if type(value) == 'table' then return value end
  bindings[i - 1] = value
end
return {string.format('%.0f', now_ms), mended, newest, entries, bindings}
"""
)
"""Read entries of a stream and session bindings, by the server's clock. A replica that takes no writes answers it too.

Returns the server's milliseconds, whether the stream's key had to be mended, where the newest entry is when the cursor
lies in the future, the entries, and a value or nil per session key.
"""

SETTLE: Final = (
    _BEGIN
    + """
-- KEYS: session keys. ARGV: time to live in ms, then per key: version, moved how many ms ago, tokens, host.
local held = {}
for i, key in ipairs(KEYS) do
  local version, ago_ms, tokens, host = ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i], ARGV[4 * i + 1]
  local moved_ms = string.format('%.0f', now_ms - ago_ms)
  local value = redis.pcall('GET', key)
  local known, known_moved_ms, known_host
  if type(value) == 'table' and not is_of_another_type(value) then return value end
  if type(value) == 'string' then
    known, known_moved_ms, known_host = string.match(value, '^1 (%d+) (%d+) %d+ (.+)$')
  end
  local lost = false
  if known and tonumber(known) >= tonumber(version) then
    lost = tonumber(known) > tonumber(version) or known_host ~= host
    moved_ms = known_moved_ms
  end
  if not lost then
    value = '1 ' .. version .. ' ' .. moved_ms .. ' ' .. tokens .. ' ' .. host
    local done = redis.pcall('SET', key, value, 'PX', ARGV[1])
    if done.err then return done end
  end
  held[i] = value
end
return {string.format('%.0f', now_ms), held}
"""
)
"""Compare and set session bindings; returns the server's milliseconds and the value that holds now, per key."""

PUBLISH: Final = (
    _BEGIN
    + """
-- KEYS: the stream. ARGV: keep for ms, entries at most, the replica, its news.
local function add()
  local oldest = string.format('%.0f', now_ms - ARGV[1])
  return redis.pcall('XADD', KEYS[1], 'MINID', '~', oldest, '*', 'p', ARGV[3], 'n', ARGV[4])
end
local done = add()
if is_of_another_type(done) then
  redis.call('DEL', KEYS[1])
  done = add()
end
if done.err then return done end
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return done
"""
)
"""Append an entry to a stream, drop those that are too old or too many, and put off the stream's expiry."""
