"""Thresholds into the text of a configuration, every other byte kept; it opens no file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Final

from extproc.config.locate import locate

_THRESHOLD: Final = re.compile(
    r"""([ \t]*(?:threshold|"threshold"|'threshold')[ \t]*=[ \t]*)[^\s#]+"""
)
_NAME: Final = re.compile(r"""([ \t]*)(?:name|"name"|'name')[ \t]*=""")
_BOM: Final = "\ufeff"


class RewriteError(Exception):
    """The text is written in a way that this cannot edit; it says what to set by hand."""


def with_thresholds(text: str, thresholds: Mapping[str, float]) -> str:
    """`text` with these thresholds for the routes named: numbers replaced, or lines added below names.

    The result means what `text` did but for the thresholds, or RewriteError is raised.
    """
    bare = text.removeprefix(_BOM)
    wanted = tomllib.loads(bare)
    found = locate(bare)
    lines: list[str] = bare.split("\n")
    added: dict[int, str] = {}
    for index, route in enumerate(wanted.get("route", [])):
        threshold = thresholds.get(route["name"])
        if threshold is None:
            continue
        if "threshold" in route:
            at = found.of(("route", index, "threshold")) - 1
            lines[at] = _THRESHOLD.sub(rf"\g<1>{threshold}", lines[at], count=1)
        elif indent := _NAME.match(lines[at := found.of(("route", index, "name")) - 1]):
            end = "\r" if lines[at].endswith("\r") else ""
            added[at] = f"{indent[1]}threshold = {threshold}{end}"
        route["threshold"] = threshold
    for at in sorted(added, reverse=True):
        lines.insert(at + 1, added[at])
    rewritten = "\n".join(lines)
    if not _means(rewritten, wanted):
        by_hand = ", ".join(f"{name} {threshold}" for name, threshold in thresholds.items())
        raise RewriteError(
            "the routes are not written as [[route]] tables with a key a line; set each threshold "
            f"by hand: {by_hand}"
        )
    return text[: len(text) - len(bare)] + rewritten


def _means(text: str, wanted: object) -> bool:
    try:
        return tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        return False
