"""JSON bodies as nobody would write them, and a slow scanner of their members; it imports no product."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import strategies as st

# --- an oracle that shares nothing with the code under test ---------------------------------------

_SPACE = " \t\r\n"


def members(raw: bytes) -> list[tuple[str, int, int]]:
    """Each top-level member: its key, and where its value begins and ends in bytes."""
    text = raw.decode()
    decoder = json.JSONDecoder(parse_int=str)

    def skip(at: int) -> int:
        while text[at] in _SPACE:
            at += 1
        return at

    def offset(at: int) -> int:
        return len(text[:at].encode())

    found = []
    at = skip(skip(0) + 1)
    while text[at] == '"':
        key, at = json.decoder.scanstring(text, at + 1)
        start = skip(skip(at) + 1)
        _, end = decoder.raw_decode(text, start)
        found.append((key, offset(start), offset(end)))
        at = skip(end)
        at = skip(at + 1) if text[at] == "," else at
    return found


def pairs(raw: bytes) -> Any:
    """The whole value, objects as lists of pairs, so that duplicates and their order count."""
    return json.loads(raw, object_pairs_hook=list, parse_int=str, parse_float=str)


# --- bodies as nobody would write them ------------------------------------------------------------

Pairs = list[tuple[str, Any]]
KEYS = st.sampled_from(
    ["model", "model", "mode", "Model", "messages", "a", "模", "\ud800", "", '"']
) | st.text(st.characters(), max_size=4)
NUMBERS = st.sampled_from(["1", "12", "-1", "1e5", "1.25", "0", "-0", "9007199254740993", "1E400"])


class Raw(str):
    """JSON text to be written as it stands."""

    __slots__ = ()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | NUMBERS.map(Raw)
    | st.sampled_from(["auto", "", '"model":', "}", ',"model":"x"', "😀", "\udc00"])
    | st.text(st.characters(), max_size=8)
)


def object_pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(KEYS, values), max_size=6).map(tuple)


VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | object_pairs(inner), max_leaves=12
)


def write(value: Any, dice: random.Random) -> str:
    """`value` as JSON with random white space and escapes; a tuple of pairs is an object."""

    def space() -> str:
        return "".join(dice.choices(_SPACE, k=dice.choice((0, 0, 0, 1, 2))))

    def char(each: str) -> str:
        code = ord(each)
        if 0xD800 <= code < 0xE000 or (code < 0x10000 and dice.random() < 0.15):
            return f"\\u{code:04{dice.choice('xX')}}"
        if code >= 0x10000 and dice.random() < 0.3:
            high, low = divmod(code - 0x10000, 0x400)
            return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04X}"
        return json.dumps(each)[1:-1] if code < 0x20 or each in '"\\' else each

    if isinstance(value, Raw):
        text = str(value)
    elif isinstance(value, str):
        text = '"' + "".join(map(char, value)) + '"'
    elif isinstance(value, list):
        text = "[" + ",".join(write(each, dice) for each in value) + (space() + "]")
    elif isinstance(value, tuple):
        inner = (f"{space()}{write(k, dice)}{space()}:{write(v, dice)}" for k, v in value)
        text = "{" + ",".join(inner) + (space() + "}")
    else:
        text = json.dumps(value)
    return space() + text + space()


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    value = draw(object_pairs(VALUES))
    return write(value, random.Random(draw(st.integers(0, 2**32)))).encode()
