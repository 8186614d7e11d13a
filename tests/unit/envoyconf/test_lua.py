"""Constants on their way into Lua, read back by Lua itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lupa import luajit21

from extproc.envoyconf.lua import literal, source

RUNTIME = luajit21.LuaRuntime(encoding=None)


@given(st.text(st.characters(codec="utf-8")))
def test_literal_reads_back_as_the_same_bytes(text: str) -> None:
    written = literal(text)
    assert written.isascii()
    assert "\n" not in written
    assert RUNTIME.eval(written.encode()) == text.encode()


@pytest.mark.parametrize(
    "text", ["]] .. os.exit() .. [[", '" .. x .. "', "\\", "\\0", "\0123", "%d", "--"]
)
def test_literal_cannot_be_broken_out_of(text: str) -> None:
    assert RUNTIME.eval(literal(text).encode()) == text.encode()


@pytest.mark.parametrize("name", ["ingress.lua", "chain.lua", "tier.lua"])
def test_script_stands_behind_its_constants_and_sees_them(name: str) -> None:
    text = source(name, {"a": 'x"y', "b": "模"}, json=name != "chain.lua")
    runtime = luajit21.LuaRuntime(encoding=None)
    runtime.execute(text.encode() + b"\nseen_a, seen_b = CONTEXT.a, CONTEXT.b")
    assert runtime.globals()[b"seen_a"] == b'x"y'
    assert runtime.globals()[b"seen_b"] == "模".encode()
    assert runtime.globals()[b"envoy_on_request"] is not None
    assert ("local function each_member" in text) == (name != "chain.lua")


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("ingress.lua", "ingress"),
        ("chain.lua", "chain.route.default"),
        ("tier.lua", "tier.primary"),
    ],
)
def test_every_constant_that_a_script_asks_for_is_given(
    rendered: Any, name: str, owner: str
) -> None:
    wanted = set(re.findall(r"CONTEXT\.(\w+)", source(name, {})))
    constants = rendered("").script(owner).partition("\n")[0]
    assert set(re.findall(r"(\w+) = \"", constants)) == wanted
