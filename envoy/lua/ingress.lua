-- Ingress: writes what the sidecar would have written for a request that passed it by (dead, too
-- slow), and gives a final failure its own status back. Runs behind ext_proc. Prepended: json.lua.

function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get("x-pointsman-chain") then return end -- the sidecar decided
  headers:replace("x-pointsman-chain", CONTEXT.chain)
  headers:replace("x-pointsman-route", CONTEXT.route)
  headers:replace("x-pointsman-reason", CONTEXT.reason)
  headers:replace("x-pointsman-stream", "false")
  local content_type = headers:get("content-type") or ""
  if content_type ~= "" and not string.find(content_type, "json", 1, true) then
    handle:clearRouteCache()
    return
  end

  local body = handle:body(true)
  headers = handle:headers() -- body() may have waited, and header objects do not outlive a wait
  local size = body:length()
  if size > 0 then
    local text = body:getBytes(0, size)
    local model, stream, spans = CONTEXT.model, false, {}
    local behind_brace = each_member(text, function(key, first, last)
      if key == "model" then spans[#spans + 1] = { first, last } end
      if key == "stream" then stream = string.sub(text, first, last) == "true" end
    end)
    if behind_brace then
      local first, last = behind_brace, behind_brace - 1
      local value = model
      if #spans > 0 then
        first, last = spans[#spans][1], spans[#spans][2] -- parsers take the last of duplicate keys
      else
        local empty = string.match(text, "^%s*}", behind_brace)
        value = '"model":' .. model .. (empty and "" or ",")
      end
      -- All but the last duplicate keep their bytes; the one that counts gets the model.
      local rewritten = string.sub(text, 1, first - 1) .. value .. string.sub(text, last + 1)
      local offset = first - 1 + (#spans > 0 and 0 or #'"model":')
      local new_size = body:setBytes(rewritten)
      if headers:get("content-length") then headers:replace("content-length", tostring(new_size)) end
      headers:replace("x-pointsman-model-span", offset .. ":" .. #model)
      headers:replace("x-pointsman-model", CONTEXT.model_name)
      if stream then headers:replace("x-pointsman-stream", "true") end
    elseif string.find(string.match(headers:get(":path") or "", "^[^?]*"), "/completions$") then
      -- An un-rewritten `auto` must not reach a provider, not even in a body it would refuse.
      handle:respond({ [":status"] = "400", ["content-type"] = "application/json" }, CONTEXT.invalid)
      return
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
end
