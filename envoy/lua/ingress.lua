-- Ingress: writes what the sidecar would have written for a request that passed it by (dead, too
-- slow), and gives a final failure its own status back. Runs behind ext_proc. Prepended: json.lua.

local function takes_model(path)
  for suffix in string.gmatch(CONTEXT.model_paths, "[^,]+") do
    if string.sub(path, -#suffix) == suffix then return true end
  end
  return false
end

-- An un-rewritten `auto` must not reach a provider, not even in a body it would refuse.
local function refuse(handle, body)
  handle:respond({ [":status"] = "400", ["content-type"] = "application/json" }, body)
end

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get("x-pointsman-chain") then return end -- the sidecar decided
  headers:replace("x-pointsman-chain", CONTEXT.chain)
  headers:replace("x-pointsman-route", CONTEXT.route)
  headers:replace("x-pointsman-reason", CONTEXT.reason)
  headers:replace("x-pointsman-stream", "false")
  local content_type = string.lower(headers:get("content-type") or "")
  if content_type ~= "" and not string.find(content_type, "json", 1, true) then
    handle:clearRouteCache()
    return
  end

  local body = handle:body(true)
  headers = handle:headers() -- body() may have waited, and header objects do not outlive a wait
  local size = body:length()
  local wanted = takes_model(string.match(headers:get(":path") or "", "^([^?]-)/*%f[?%z]"))
  if size > 0 then
    local text = body:getBytes(0, size)
    local model, stream, spans = CONTEXT.model, false, {}
    local behind_brace = each_member(text, function(key, first, last)
      if key == "model" then spans[#spans + 1] = { first, last } end
      if key == "stream" then stream = string.sub(text, first, last) == "true" end
    end)
    if #spans > 1 then return refuse(handle, CONTEXT.duplicate) end
    if behind_brace and (wanted or #spans > 0) then
      local first, last = behind_brace, behind_brace - 1
      local value = model
      if #spans > 0 then
        first, last = spans[1][1], spans[1][2]
      else
        local empty = string.match(text, "^%s*}", behind_brace)
        value = '"model":' .. model .. (empty and "" or ",")
      end
      local rewritten = string.sub(text, 1, first - 1) .. value .. string.sub(text, last + 1)
      local offset = first - 1 + (#spans > 0 and 0 or #'"model":')
      local new_size = body:setBytes(rewritten)
      if headers:get("content-length") then headers:replace("content-length", tostring(new_size)) end
      headers:replace("x-pointsman-model-span", offset .. ":" .. #model)
      headers:replace("x-pointsman-model", CONTEXT.model_name)
      if stream then headers:replace("x-pointsman-stream", "true") end
    elseif wanted and not behind_brace then
      return refuse(handle, CONTEXT.invalid)
    end
  end
  handle:clearRouteCache()
end

function envoy_on_response(handle)
  local headers = handle:headers()
  local status = headers:get("x-pointsman-status")
  if status then headers:replace(":status", status) end
  headers:remove("x-pointsman-status")
  headers:remove("x-pointsman-fail")
  -- A body whose framing breaks midway, Envoy's codec refuses with a plain text of its own.
  if
    headers:get(":status") == "400"
    and headers:get("content-type") == "text/plain"
    and not headers:get("x-pointsman-route")
  then
    local size = handle:body(true):setBytes(CONTEXT.bad_request)
    headers = handle:headers()
    headers:replace("content-type", "application/json")
    headers:replace("content-length", tostring(size))
    for name in string.gmatch("route,upstream,model,attempts", "[^,]+") do
      headers:replace("x-pointsman-" .. name, "none")
    end
    headers:replace("x-pointsman-reason", "local")
  end
end
