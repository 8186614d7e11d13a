"""A fault of a configuration file, and the exception that carries them all; it reads no file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHOWN = 60
"""Characters of a key or value that a fault repeats: a pasted document must not fill the screen."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to mend. `line` counts from 1; `key` is dotted, with array items as `[0]`."""

    file: str
    line: int
    key: str
    problem: str
    mend: str

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}: {self.key}: {self.problem}; {self.mend}"
        # Keys and values are the file's: no line break or terminal escape in them may get out.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ConfigError(Exception):
    """Every fault of one file, in the order of its lines."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: fault.line))
        super().__init__(self.faults)

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))


def quoted(text: str) -> str:
    """The text as TOML would write it, cut to a readable length."""
    cut = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return json.dumps(cut, ensure_ascii=False)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt one probably meant."""
    # difflib is quadratic in the length of a word, and no known word is that long.
    return next(iter(get_close_matches(word[:_SHOWN], list(known), n=1)), None)
