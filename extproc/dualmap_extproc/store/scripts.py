"""The Lua scripts that run in Redis.

Each script uses keys of one pool, which have the same hash tag and are therefore on the same node.

The router sends scripts as text (EVAL). Redis compiles a text once, and the router need not load scripts again after a
restart, SCRIPT FLUSH or a failover. A reply is an error if Redis rejected a write. Scripts replace a key of the wrong
type, because keys with this prefix belong to the router.
"""

from typing import Final

_BEGIN: Final = """
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function is_of_another_type(reply)
  return type(reply) == 'table' and reply.err and string.find(reply.err, 'WRONGTYPE', 1, true)
end
"""

READ: Final = (
    _BEGIN
    + """
-- KEYS: three streams, then session keys. ARGV, for each stream: the cursor, without one how many ms back, the count.
-- Then the largest sizes of an entry and of a binding in bytes.
local entry_bytes, binding_bytes = tonumber(ARGV[10]), tonumber(ARGV[11])
local mended, oversized = 0, 0
local function size(entry)
  local bytes = 0
  for _, text in ipairs(entry[2]) do bytes = bytes + #text + 8 end
  return bytes
end
-- Removes an entry and the entries before it. A read-only replica cannot remove it; the reader then only skips it.
local function remove_up_to(key, id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  -- A larger number would lose precision.
  if tonumber(number) < 2^53 then
    redis.pcall('XTRIM', key, 'MINID', string.format('%s-%.0f', ms, number + 1))
  else
    redis.pcall('DEL', key)
  end
end
-- Reads one entry after the other, because a page of oversized entries would take longer than a reader waits. A page
-- ends after ``entry_bytes``.
local function page(key, from, count)
  local entries, last, bytes = {}, nil, 0
  while #entries < count and bytes < entry_bytes do
    local found = redis.pcall('XRANGE', key, from, '+', 'COUNT', 1)
    if found.err and not last then return found end
    -- Nothing can follow an entry with the largest possible id: the range after it is an error.
    if found.err or #found == 0 then break end
    last = found[1][1]
    local of_entry = size(found[1])
    bytes = bytes + of_entry
    if of_entry > entry_bytes then
      remove_up_to(key, last)
      oversized = oversized + 1
    else
      entries[#entries + 1] = found[1]
    end
    from = '(' .. last
  end
  return {last, entries}
end
local function read(key, cursor, window_ms, count)
  local from = '(' .. cursor
  if cursor == '' then
    cursor = string.format('%.0f-0', math.max(0, now_ms - window_ms))
    from = cursor
  end
  local found = page(key, from, count)
  if found.err and string.match(cursor, '^18446744073709551615%-') then
    -- Another client wrote the largest possible id. Nothing can follow it, so the stream starts again.
    redis.pcall('DEL', key)
    return {'0-0', {}}
  end
  if is_of_another_type(found) then
    -- A read-only replica cannot delete it; the next publication will.
    redis.pcall('DEL', key)
    mended, found = mended + 1, {nil, {}}
  end
  if found.err then return found end
  local last, entries = found[1], found[2]
  if last then
    cursor = last
  elseif tonumber(string.match(cursor, '^%d+')) > now_ms then
    -- The cursor comes from a clock that was ahead. New entries would have smaller ids and never be read.
    local newest = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
    cursor = #newest > 0 and newest[1][1] or '0-0'
  end
  return {cursor, entries}
end
local streams = {}
for i = 1, 3 do
  streams[i] = read(KEYS[i], ARGV[3 * i - 2], ARGV[3 * i - 1], tonumber(ARGV[3 * i]))
  if streams[i].err then return streams[i] end
end
local bindings = {}
for i = 4, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if is_of_another_type(value) then value = '' end
  if type(value) == 'table' then return value end
  if value and #value > binding_bytes then
    redis.pcall('DEL', KEYS[i])
    value, oversized = false, oversized + 1
  end
  bindings[i - 3] = value
end
return {string.format('%.0f', now_ms), mended, oversized, streams, bindings}
"""
)
"""Read new entries of three streams, and session bindings. A read-only replica of Redis can also run the script.

The script returns the server's time in milliseconds and the number of keys of the wrong type. For each stream, the
script returns the new cursor and the entries, oldest first. For each session key, the script returns a value or nil.

The script removes oversized entries and bindings, and returns their number after the number of keys. Redis runs a
script to its end. Therefore the script also removes an entry if reading it takes longer than the reader waits.
"""

RESOLVE: Final = (
    _BEGIN
    + """
-- KEYS: session keys. ARGV: time to live in ms, then per key: version, moved how many ms ago, tokens, host. Last, the
-- largest size of a binding in bytes.
local held, binding_bytes = {}, tonumber(ARGV[#ARGV])
for i, key in ipairs(KEYS) do
  local version, ago_ms, tokens, host = ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i], ARGV[4 * i + 1]
  local moved_ms = string.format('%.0f', now_ms - ago_ms)
  local value = redis.pcall('GET', key)
  local known, known_moved_ms, known_host
  if type(value) == 'table' and not is_of_another_type(value) then return value end
  if type(value) == 'string' and #value <= binding_bytes then
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
"""Compare and set session bindings; return the server's time in milliseconds and the valid value per key."""

ANNOUNCE: Final = (
    _BEGIN
    + """
-- KEYS: a stream. ARGV: the router, its address, time to keep in ms, most entries, most routers, most bytes of both.
local key, keep_ms = KEYS[1], tonumber(ARGV[3])
local since = string.format('%.0f', math.max(0, now_ms - keep_ms))
local function add()
  return redis.pcall('XADD', key, 'MINID', since, '*', 'p', ARGV[1], 'a', ARGV[2])
end
local done = add()
if is_of_another_type(done) or (done.err and string.find(done.err, 'exhausted', 1, true)) then
  redis.call('DEL', key)
  done = add()
end
if done.err then return done end
redis.call('XTRIM', key, 'MAXLEN', ARGV[4])
redis.call('PEXPIRE', key, keep_ms)
local known, addresses, to = {}, {}, '+'
-- Reads one entry after the other, because another client may have written large ones.
while #addresses < tonumber(ARGV[5]) do
  local entry = redis.call('XREVRANGE', key, to, '-', 'COUNT', 1)[1]
  if not entry then break end
  local bytes, name, address = 0, entry[2][2], entry[2][4]
  for _, text in ipairs(entry[2]) do bytes = bytes + #text end
  if bytes > tonumber(ARGV[6]) then
    -- The routers announce themselves again within a second.
    redis.call('DEL', key)
    break
  end
  if address and not known[name] then
    known[name] = true
    addresses[#addresses + 1] = address
  end
  to = '(' .. entry[1]
end
return addresses
"""
)
"""Append a router's address to a stream, drop those that are too old or too many, and return each router's last one."""

PUBLISH: Final = (
    _BEGIN
    + """
-- KEYS: streams. ARGV: the replica, then per key: time to keep in ms, most entries, most bytes, the entry.
local function bytes_up_to(entry)
  local fields = entry and entry[2] or {}
  for i = 1, #fields - 1, 2 do
    -- At most fifteen digits: a larger invalid value would lose precision as a number.
    if fields[i] == 'b' and #fields[i + 1] < 16 and string.match(fields[i + 1], '^%d+$') then
      return tonumber(fields[i + 1])
    end
  end
  return 0
end
for i, key in ipairs(KEYS) do
  local keep_ms, most, most_bytes, told = ARGV[4 * i - 2], ARGV[4 * i - 1], tonumber(ARGV[4 * i]), ARGV[4 * i + 1]
  local newest = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if is_of_another_type(newest) then
    redis.call('DEL', key)
    newest = {}
  end
  if newest.err then return newest end
  local bytes = bytes_up_to(newest[1]) + #told
  local since = string.format('%.0f', math.max(0, now_ms - keep_ms))
  local count = string.format('%.0f', bytes)
  local function add()
    return redis.pcall('XADD', key, 'MINID', '~', since, '*', 'p', ARGV[1], 'n', told, 'b', count)
  end
  local done = add()
  if done.err and string.find(done.err, 'exhausted', 1, true) then
    -- Another client wrote the largest possible id.
    redis.call('DEL', key)
    done = add()
  end
  if done.err then return done end
  redis.call('XTRIM', key, 'MAXLEN', '~', most)
  local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)
  while bytes - bytes_up_to(oldest[1]) > most_bytes do
    oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 16)
    -- The newest entry stays even if its count is invalid, so that the loop ends.
    if #oldest == 1 then break end
    oldest = {oldest[#oldest]}
    redis.call('XTRIM', key, 'MINID', oldest[1][1])
  end
  redis.call('PEXPIRE', key, keep_ms)
end
return 'OK'
"""
)
"""Append an entry to each stream, drop entries that are too old or too many, and extend the streams' expiry.

The field ``b`` of an entry is the total number of bytes that its stream has received. The script uses this number to
limit the stream's size. If one stream rejects its entry, the script does not write to the later streams.
"""
