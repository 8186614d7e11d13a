"""The scanner that Lua filters find members with, against Python's json."""

from __future__ import annotations

from typing import Any

import pytest
from bodies import bodies, members
from hypothesis import example, given, settings
from lupa import luajit21

from extproc.envoyconf.lua import _read

RUNTIME = luajit21.LuaRuntime(encoding=None)
SCAN = RUNTIME.execute(
    _read("json.lua").encode()
    + b"""
return function(text)
  local found = {}
  local behind = each_member(text, function(key, first, last) found[#found + 1] = { key, first, last } end)
  return behind, found
end
"""
)


def scan(raw: bytes) -> tuple[int | None, list[tuple[bytes, int, int]]]:
    """What each_member answers, and its members with Python's positions."""
    behind, found = SCAN(raw)
    return behind, [(each[1], each[2] - 1, each[3]) for each in found.values()]


@settings(max_examples=150)
@given(bodies())
@example(b"{}")
@example(b' { "a" : [ { } , "]" ] } ')
@example(b'{"a":"\\\\","model":1}')
@example(b'{"a":"\\"","model":1}')
@example(b'{"\\\\u006dodel":1}')
@example(b'{"mod\\u0065l":"x"}')
def test_members_stand_where_python_finds_them(raw: bytes) -> None:
    behind, found = scan(raw)
    expected = members(raw)
    assert [(start, end) for _, start, end in found] == [(start, end) for _, start, end in expected]
    for (key, _, _), (name, _, _) in zip(found, expected, strict=True):
        assert (key == b"model") == (name == "model")
    assert behind == raw.index(b"{") + 2


@settings(max_examples=40)
@given(bodies())
def test_object_torn_anywhere_is_none(raw: bytes) -> None:
    whole = raw.rstrip(b" \t\r\n")
    for end in range(len(whole)):
        assert scan(whole[:end])[0] is None, whole[:end]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"[]",
        b"null",
        b'"{}"',
        b"{}x",
        b"{}{}",
        b'{"a":1}]',
        b'{"a"}',
        b'{"a":}',
        b"{a:1}",
        b'{"a":1,}',
        b'{,"a":1}',
        b'{"a":1 "b":2}',
        b'{"a":[}',
        b'{"a":"\\',
        b"<html>",
        b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"a":1}',
    ],
)
def test_anything_but_one_whole_object_is_none(raw: bytes) -> None:
    assert scan(raw)[0] is None


def test_nothing_inside_a_value_is_taken_for_a_member() -> None:
    raw = b'{"a":{"model":1,"x":[{"model":2}]},"b":"\\",\\"model\\":3","model":4}'
    assert [(key, raw[start:end]) for key, start, end in scan(raw)[1] if key == b"model"] == [
        (b"model", b"4")
    ]


def test_depth_is_no_danger() -> None:
    raw = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b',"model":1}'
    assert [key for key, _, _ in scan(raw)[1]] == [b"a", b"model"]


def test_any_error_in_the_visitor_is_its_own() -> None:
    visit: Any = RUNTIME.execute(_read("json.lua").encode() + b"\nreturn each_member")
    with pytest.raises(luajit21.LuaError):
        visit(b'{"a":1}', RUNTIME.eval(b'function() error("mine") end'))
