"""The lines of tables, keys and array items in a text that tomllib has accepted; it judges nothing.

tomllib keeps no positions. Because the text is known to be legal, this scanner may be laxer than a
parser: it only has to know where a string ends, what opens a table, and what counts as a key.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from contextlib import suppress

Path = tuple[str | int, ...]
"""Keys and array indexes from the root, as they would index tomllib's result."""

_BLANK = re.compile(r"(?:[ \t\n,]|#[^\n]*)*")
"""Commas too: between items they separate nothing that the next token does not show."""
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\]|\\.)*"' r"|'[^']*'", re.DOTALL
)
_SCALAR = re.compile(r"[^,\]}#\n]+")
_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_OPEN = re.compile(r"\[\[?[ \t]*")
_CLOSE = re.compile(r"[ \t]*\]\]?")


class Lines:
    """Line numbers, from 1, by path."""

    def __init__(self, found: dict[Path, int]) -> None:
        self._found = found

    def of(self, path: Path) -> int:
        """The line of the path, or of the nearest thing around it that stands in the file."""
        while path and path not in self._found:
            path = path[:-1]
        return self._found.get(path, 1)


def locate(text: str) -> Lines:
    """Scan a legal TOML text. Should it lose its way, what it found until then stands."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    # A fault named with its table's line is worth more than no fault at all.
    with suppress(LookupError):
        scanner.document()
    return Lines(scanner.found)


class _Scanner:
    """Mutable state: the position, the lines found, and the last index of each array of tables."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self._at = 0
        self._last: dict[Path, int] = {}
        self.found: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        self._take(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._take(_BLANK)

    def _header(self) -> Path:
        line, is_item = self._line(), self._take(_OPEN).startswith("[[")
        parts = self._key()
        self._take(_CLOSE)
        path: Path = ()
        for depth, part in enumerate(parts, start=1):
            path = (*path, part)
            self.found.setdefault(path, line)
            if is_item and depth == len(parts):
                self._last[path] = self._last.get(path, -1) + 1
            if path in self._last:
                path = (*path, self._last[path])
        # A table's own header beats a line noted because a child of it came first.
        self.found[path] = line
        return path

    def _pair(self, table: Path) -> None:
        line, path = self._line(), table
        for part in self._key():
            path = (*path, part)
            self.found.setdefault(path, line)
        self._take(_EQUALS)
        self._value(path)

    def _key(self) -> list[str]:
        parts = [self._key_part()]
        while _DOT.match(self._text, self._at):
            self._take(_DOT)
            parts.append(self._key_part())
        return parts

    def _key_part(self) -> str:
        token = self._take(_KEY_PART)
        if token[0] == '"':
            return str(tomllib.loads(f"key = {token}")["key"])
        return token.strip("'")

    def _value(self, path: Path) -> None:
        # One frame for each level of nesting, where tomllib spends two: what it accepts fits here.
        opening = self._text[self._at]
        if opening not in "[{":
            self._take(_STRING if opening in "\"'" else _SCALAR)
            return
        self._at += 1
        index = 0
        self._take(_BLANK)
        while self._text[self._at] not in "]}":
            if opening == "{":
                self._pair(path)
            else:
                self.found[(*path, index)] = self._line()
                self._value((*path, index))
                index += 1
            self._take(_BLANK)
        self._at += 1

    def _take(self, token: re.Pattern[str]) -> str:
        match = token.match(self._text, self._at)
        if match is None:
            raise LookupError(self._at)
        self._at = match.end()
        return match.group()

    def _line(self) -> int:
        return bisect_left(self._breaks, self._at) + 1
