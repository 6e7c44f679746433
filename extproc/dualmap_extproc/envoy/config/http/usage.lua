-- This script reads token usage from responses chunk by chunk and writes it as dynamic metadata. The script does not
-- change, delay or buffer responses. The module usage.py adds the definitions of NAMESPACE, PROMPT, COMPLETION and
-- CACHED before this text.
--
-- The script finds the usage object by its key. JSON escapes quotes within strings. Therefore the seven characters
-- "usage" after a brace, a comma or a blank are a complete JSON string. The string is a key if a colon follows. No text
-- of the model can imitate this key. A response may be invalid JSON. The script therefore limits the work per byte for
-- any input.

local KEY = '"usage"'
local WINDOW_BYTES = 65536 -- the most bytes of a chunk that one search covers: chunks may have megabytes
local OBJECT_BYTES = 2048  -- the longest usage object, from its key to its closing brace
local LAST = 4             -- the most keys checked per window, from its end: later counts replace earlier ones

local function is_readable(headers)
  local encoding = headers:get("content-encoding") or "identity"
  local kind = string.lower(headers:get("content-type") or "")
  local is_json = string.find(kind, "application/json", 1, true) == 1
  return encoding == "identity" and (is_json or string.find(kind, "text/event-stream", 1, true) == 1)
end

-- Returns the digits of the whole number under a key.
local function count(object, key)
  return string.match(object, '"' .. key .. '"%s*:%s*(%d+)%s*[,}]')
end

-- Returns the first count of a list, which has one count for each prompt that the engine computed for the request.
local function first_count(object, key)
  return string.match(object, '"' .. key .. '"%s*:%s*%[%s*(%d+)%s*[,%]]')
end

-- Returns the prompt's tokens in a usage object of the messages API, which counts the tokens of the cache apart. Returns
-- nil if a count is no number. An absent count is 0.
local function messages_prompt(object)
  local prompt = count(object, "input_tokens")
  for _, key in ipairs({"cache_read_input_tokens", "cache_creation_input_tokens"}) do
    local value = string.match(object, '"' .. key .. '"%s*:%s*([^,}]*)')
    if prompt and value and not string.find(value, "^null%s*$") then
      local part = count(object, key)
      prompt = part and string.format("%.0f", tonumber(prompt) + tonumber(part))
    end
  end
  return prompt
end

-- Returns the counts in a usage object of any API that usage.py lists.
local function counts(object)
  local outer = "{" .. string.gsub(string.sub(object, 2, -2), "%b{}", "") .. "}"
  local details = string.match(object, '"prompt_tokens_details"%s*:%s*(%b{})')
    or string.match(object, '"input_tokens_details"%s*:%s*(%b{})') or ""
  return {
    [PROMPT] = count(outer, "prompt_tokens") or first_count(details, "input_tokens_per_turn") or messages_prompt(outer),
    [COMPLETION] = count(outer, "completion_tokens") or count(outer, "output_tokens"),
    [CACHED] = first_count(details, "cached_tokens_per_turn") or count(details, "cached_tokens")
      or count(outer, "cache_read_input_tokens"),
  }
end

-- Returns the counts of the usage object whose key starts at a position. Without counts, returns nil and whether the
-- object may continue in the next window.
local function usage_at(text, at)
  if not string.find(text, "^[{,%s]", at - 1) then return nil, false end
  local found = string.sub(text, at + #KEY, at + OBJECT_BYTES - 1)
  local object = string.match(found, "^%s*:%s*(%b{})")
  if object then
    local read = counts(object)
    return next(read) and read, false
  end
  local begun = string.find(found, "^%s*$") or string.find(found, "^%s*:%s*$") or string.find(found, "^%s*:%s*{")
  return nil, begun ~= nil and #text - at < OBJECT_BYTES
end

-- Returns the counts of the last usage objects in a text, and the end of the text, which may continue in the next window.
-- A later object replaces the counts that it has: an engine may write the prompt first, and the completion at the end.
local function last_usage(text)
  local places, number = {}, 0
  local at = string.find(text, KEY, 1, true)
  while at do
    number = number + 1
    places[number % LAST] = at
    at = string.find(text, KEY, at + #KEY, true)
  end
  local usage, rest = {}, string.sub(text, -#KEY)
  for index = math.max(1, number - LAST + 1), number do
    local place = places[index % LAST]
    local found, may_come = usage_at(text, place)
    for tag, value in pairs(found or {}) do usage[tag] = value end
    if may_come and index == number then rest = string.sub(text, math.max(1, place - 1)) end
  end
  return usage, rest
end

function envoy_on_response(handle)
  if not is_readable(handle:headers()) then return end
  local known, rest = {}, ""
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    for start = 0, length - 1, WINDOW_BYTES do
      local usage
      usage, rest = last_usage(rest .. chunk:getBytes(start, math.min(WINDOW_BYTES, length - start)))
      for tag, value in pairs(usage) do
        -- The script writes each value immediately, because a client may disconnect after the last event.
        if known[tag] ~= value then handle:streamInfo():dynamicMetadata():set(NAMESPACE, tag, value) end
        known[tag] = value
      end
    end
  end
end
