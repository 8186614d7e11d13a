-- Chain: an upstream filter of the aggregate cluster, run once per attempt. Request headers are
-- shared by all attempts of a request, so the story so far is kept there: overwritten, never appended.

-- `members`: the chain's upstream names in order, ",a,b,rule,".
local function position(members, name)
  return string.find(members, "," .. name .. ",", 1, true) or 0
end

function envoy_on_request(handle)
  local headers = handle:headers()
  local name = headers:get("x-pointsman-upstream") or ""
  local members = CONTEXT.members
  local attempts = headers:get("x-pointsman-attempts") or ""
  -- An attempt that got no response at all ran into the chain's own time limit for an attempt.
  if string.sub(attempts, -1) == ":" then
    attempts = attempts .. "timeout"
    if not headers:get("x-pointsman-fallback") then
      headers:replace("x-pointsman-fallback", "timeout")
    end
  end
  local last = string.match(attempts, "([^,:]+):[^,]*$")
  -- Members passed over between two attempts had been ejected by outlier detection.
  local from = last and position(members, last) or 0
  local here = position(members, name)
  for skipped in string.gmatch(members, "[^,]+") do
    local at = position(members, skipped)
    if at > from and at < here then
      attempts = attempts .. (attempts == "" and "" or ",") .. skipped .. ":circuit_open"
      if not headers:get("x-pointsman-fallback") then
        headers:replace("x-pointsman-fallback", "circuit_open")
      end
    end
  end
  -- The name alone: an attempt under way. A client that leaves now leaves this in the account.
  headers:replace("x-pointsman-attempts", attempts .. (attempts == "" and "" or ",") .. name .. ":")
end

function envoy_on_response(handle)
  local request, headers = handle:requestHeaders(), handle:headers()
  local reason = headers:get("x-pointsman-fail")
  local attempts = request:get("x-pointsman-attempts") or ""
  -- Tries on the same upstream before the last one; what each of them met, only its stats know.
  local tries = tonumber(headers:get("x-envoy-attempt-count") or 1)
  if tries > 1 then
    local name = string.match(attempts, "([^,:]+):$") or ""
    attempts = string.sub(attempts, 1, -#name - 2) .. string.rep(name .. ":retried,", tries - 1) .. name .. ":"
  end
  headers:remove("x-envoy-attempt-count")
  attempts = attempts .. (reason or headers:get(":status"))
  request:replace("x-pointsman-attempts", attempts)
  headers:replace("x-pointsman-attempts", attempts)
  if reason and not request:get("x-pointsman-fallback") then
    request:replace("x-pointsman-fallback", reason)
  end
  local fallback = request:get("x-pointsman-fallback")
  if fallback then headers:replace("x-pointsman-fallback", fallback) end
end
