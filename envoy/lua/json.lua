-- Finds the top-level members of a JSON object by byte position; it never builds the value and
-- never looks into nested ones, so nothing a client writes into a message can be mistaken for a key.

local find, byte, sub, match = string.find, string.byte, string.sub, string.match

-- `i` is at the opening quote; answers the index behind the closing one, or nil when torn.
local function skip_string(s, i)
  i = i + 1
  while true do
    local j = find(s, '["\\]', i)
    if not j then return nil end
    if byte(s, j) == 34 then return j + 1 end
    i = j + 2
  end
end

-- Answers the index behind the value that starts at `i`, or nil when it is torn.
local function skip_value(s, i)
  local c = byte(s, i)
  if c == 34 then return skip_string(s, i) end
  if c ~= 123 and c ~= 91 then
    local j = match(s, "^[%w%.%+%-]+()", i)
    return j
  end
  local depth = 0
  repeat
    local j = find(s, '["%[%]{}]', i)
    if not j then return nil end
    c = byte(s, j)
    if c == 34 then
      i = skip_string(s, j)
      if not i then return nil end
    else
      depth = depth + ((c == 123 or c == 91) and 1 or -1)
      i = j + 1
    end
  until depth == 0
  return i
end

-- Calls visit(key, first, last) for each top-level member of the object in `s`, `first` and `last`
-- being the 1-based inclusive positions of the value. Answers the position behind the opening
-- brace when `s` is one complete object and nothing else, otherwise nil.
local function each_member(s, visit)
  local i = match(s, "^%s*{()")
  if not i then return nil end
  local body = i
  i = match(s, "^%s*()", i)
  if byte(s, i) ~= 125 then
    while true do
      if byte(s, i) ~= 34 then return nil end
      local behind = skip_string(s, i)
      if not behind then return nil end
      local key = sub(s, i + 1, behind - 2)
      if find(key, "\\u00", 1, true) then -- an escaped letter spells the same key
        key = string.gsub(key, "\\u00(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end)
      end
      local first = match(s, "^%s*:%s*()", behind)
      if not first then return nil end
      local next_i = skip_value(s, first)
      if not next_i then return nil end
      visit(key, first, next_i - 1)
      local c
      c, i = match(s, "^%s*([,}])%s*()", next_i)
      if not c then return nil end
      if c == "}" then break end
    end
  else
    i = i + 1
  end
  if not match(s, "^%s*$", i) then return nil end
  return body
end
