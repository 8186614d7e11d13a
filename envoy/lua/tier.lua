-- Tier: puts this upstream's model name into the request body and names what was wrong with the
-- answer. Runs once per visit to the upstream, retries included. Prepended: json.lua.

-- Failures travel to the chain as a status that its outlier detection counts (5xx) or does not
-- (4xx), whatever the provider sent; the true one waits in x-pointsman-status.
local UNCOUNTED = "460"

local function fail(handle, reason)
  local headers = handle:headers()
  local status = headers:get(":status")
  local counted = string.find(CONTEXT.counted, "," .. reason .. ",", 1, true)
  headers:replace("x-pointsman-fail", reason)
  if counted and tonumber(status) < 500 then
    headers:replace("x-pointsman-status", reason == "bad_schema" and "502" or status)
    headers:replace(":status", "502")
  elseif not counted and (tonumber(status) >= 500 or status == "200") then
    headers:replace("x-pointsman-status", reason == "bad_schema" and "502" or status)
    headers:replace(":status", UNCOUNTED)
  end
end

function envoy_on_request(handle)
  local headers = handle:headers()
  -- The router strips our headers before the provider sees them, so the account keeps a copy.
  local metadata = handle:streamInfo():dynamicMetadata()
  for _, name in ipairs({ "route", "admission" }) do
    local value = headers:get("x-pointsman-" .. name)
    if value then metadata:set("pointsman", name, value) end
  end
  local model_name = CONTEXT.model_name
  local offset, length = string.match(headers:get("x-pointsman-model-span") or "", "^(%d+):(%d+)$")
  -- The body already names the first upstream of the chain: most requests need no copy here.
  if offset and headers:get("x-pointsman-model") ~= model_name then
    local body = handle:body(true)
    local text = body:getBytes(0, body:length())
    local size = body:setBytes(
      string.sub(text, 1, offset) .. CONTEXT.model .. string.sub(text, offset + length + 1)
    )
    headers = handle:headers() -- body() may have waited, and header objects do not outlive a wait
    if headers:get("content-length") then headers:replace("content-length", tostring(size)) end
  end
  headers:replace("x-pointsman-model", model_name)
end

local COUNTS = { prompt_tokens = true, completion_tokens = true }

-- Token counts of an answer that is in hand anyway, for the account; a stream's, Envoy reads itself.
local function keep_usage(handle, usage)
  local metadata = handle:streamInfo():dynamicMetadata()
  each_member(usage, function(key, first, last)
    local count = COUNTS[key] and string.match(string.sub(usage, first, last), "^%d+$")
    if count then metadata:set("pointsman", key, tonumber(count)) end
  end)
end

-- Whether a 200 is what a completions client can read: one JSON object with a non-empty `choices`.
local function readable(handle, content_type)
  if not string.find(content_type, "json", 1, true) then return false end
  local body = handle:body(true)
  local text = body:getBytes(0, body:length())
  local choices, usage = false, nil
  local whole = each_member(text, function(key, first, last)
    if key == "choices" then choices = string.find(text, "^%[%s*[^%]%s]", first) ~= nil end
    if key == "usage" then usage = string.sub(text, first, last) end
  end)
  if whole and choices and usage then keep_usage(handle, usage) end
  return whole and choices
end

-- Other answers pass as they come; one that says how small it is may wait to have its usage read.
local SMALL = 1024 * 1024

local function read_usage(handle, headers, content_type)
  local size = tonumber(headers:get("content-length") or "")
  if not size or size > SMALL or not string.find(content_type, "json", 1, true) then return end
  if handle:requestHeaders():get(":method") ~= "POST" then return end
  local body = handle:body(true)
  local text = body:getBytes(0, body:length())
  each_member(text, function(key, first, last)
    if key == "usage" then keep_usage(handle, string.sub(text, first, last)) end
  end)
end

function envoy_on_response(handle)
  local headers = handle:headers()
  headers:replace("x-pointsman-upstream", CONTEXT.name)
  headers:replace("x-pointsman-model", CONTEXT.model_name)
  local labelled = headers:get("x-pointsman-fail") -- by local_reply_config, from the response flag
  if labelled then
    if labelled ~= "circuit_open" then fail(handle, labelled) end
    return
  end
  local status = headers:get(":status")
  if tonumber(status) >= 500 then return fail(handle, "5xx") end
  if status == "429" then return fail(handle, "rate_limited") end
  if headers:get("content-encoding") then return end
  local content_type = string.lower(headers:get("content-type") or "")
  if status == "400" and string.find(content_type, "json", 1, true) then
    local body = handle:body(true)
    local text = body:getBytes(0, body:length())
    -- A larger window may stand further on in the chain.
    if string.find(text, '"context_length_exceeded"', 1, true) then fail(handle, "context_length") end
    return
  end
  if status ~= "200" then return end
  local path = string.match(handle:requestHeaders():get(":path") or "", "^([^?]-)/*%f[?%z]") or ""
  if not string.find(path, "/completions$") then return read_usage(handle, headers, content_type) end
  if string.find(content_type, "text/event-stream", 1, true) then return end -- never buffer a stream
  if not readable(handle, content_type) then fail(handle, "bad_schema") end
end
