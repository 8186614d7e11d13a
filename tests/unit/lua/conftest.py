"""Envoy's Lua filters in the LuaJIT that Envoy embeds, with a handle that is as strict as Envoy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from lupa import luajit21

from extproc.envoyconf import lua

# A wait for the body ends the life of header objects taken before it, as in Envoy.
_HANDLE = """
return function(request, response, body)
  local waits, phase = 0, request
  local seen = { metadata = {} }
  local function headers(map)
    local taken = waits
    local function alive() assert(taken == waits, "object has outlived its wait") end
    return {
      get = function(_, name) alive() return map[name] end,
      replace = function(_, name, value) alive() assert(type(value) == "string") map[name] = value end,
      remove = function(_, name) alive() map[name] = nil end,
    }
  end
  local buffer = {
    length = function() return #body end,
    getBytes = function(_, index, length)
      assert(index + length <= #body, "index/length must be within the buffer range")
      return string.sub(body, index + 1, index + length)
    end,
    setBytes = function(_, bytes) body = bytes return #bytes end,
  }
  return {
    seen = seen,
    begin = function(_, answered, text) phase, body = answered, text end,
    text = function() return body end,
    headers = function() return headers(phase) end,
    requestHeaders = function() return headers(request) end,
    body = function(_, always)
      assert(always == true)
      waits = waits + 1
      seen.buffered = true
      return buffer
    end,
    clearRouteCache = function() seen.cleared = true end,
    respond = function(_, map, text) seen.status, seen.answer = map[":status"], text end,
    streamInfo = function()
      return { dynamicMetadata = function()
        return { set = function(_, space, key, value) seen.metadata[space .. "." .. key] = value end }
      end }
    end,
  }
end
"""


class Filter:
    """One script under one configuration."""

    def __init__(self, name: str, constants: Mapping[str, str], *, json: bool) -> None:
        self._lua = luajit21.LuaRuntime(encoding="latin-1", unpack_returned_tuples=True)
        self._new = self._lua.execute(_HANDLE)
        self._lua.execute(lua.source(name, constants, json=json))

    def exchange(self, body: bytes = b"", **headers: str) -> Exchange:
        """A request of these headers (`_` for `-`, `path` for `:path`) and this body."""
        return Exchange(self._lua, self._new, headers, body)


class Exchange:
    """A request and perhaps its response, as the filter leaves them."""

    def __init__(self, runtime: Any, new: Any, headers: Mapping[str, str], body: bytes) -> None:
        self._lua = runtime
        self.request = runtime.table_from(_spelled(headers))
        self._handle = new(self.request, None, body.decode("latin-1"))
        self.seen = self._handle.seen

    def on_request(self) -> Exchange:
        self._lua.globals().envoy_on_request(self._handle)
        return self

    def on_response(self, status: int, body: bytes = b"", **headers: str) -> Exchange:
        self.response = self._lua.table_from({":status": str(status), **_spelled(headers)})
        self._handle.begin(self._handle, self.response, body.decode("latin-1"))
        self._lua.globals().envoy_on_response(self._handle)
        return self

    @property
    def body(self) -> bytes:
        return str(self._handle.text()).encode("latin-1")


def _spelled(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        ":path" if key == "path" else key.replace("_", "-"): value for key, value in headers.items()
    }


@pytest.fixture(scope="session")
def load() -> Callable[..., Filter]:
    return Filter
