"""Lua sources from envoy/lua with their constants in front; it knows no Envoy message."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2] / "envoy" / "lua"


@cache
def _read(name: str) -> str:
    # A checkout is read in place, so that an edit shows at the next render; a wheel carries a copy.
    if _CHECKOUT.is_dir():
        return (_CHECKOUT / name).read_text(encoding="utf-8")
    return (resources.files("extproc") / "_envoy" / "lua" / name).read_text(encoding="utf-8")


def literal(text: str) -> str:
    """`text` as a Lua string literal; every byte outside plain ASCII becomes a decimal escape."""
    safe = (
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03d}"
        for byte in text.encode()
    )
    return '"' + "".join(safe) + '"'


def source(name: str, constants: Mapping[str, str], *, json: bool = False) -> str:
    """The script `name` with `CONTEXT` defined before it, and json.lua where it scans bodies.

    Constants go into the source, not into Lua's `filter_context`, because the typed messages of
    envoy-data-plane 2.2 do not have that field yet.
    """
    context = ", ".join(f"{key} = {literal(value)}" for key, value in constants.items())
    parts = [f"local CONTEXT = {{ {context} }}\n"]
    if json:
        parts.append(_read("json.lua"))
    parts.append(_read(name))
    return "\n".join(parts)
