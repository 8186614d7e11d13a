"""TOML tables being read: they collect faults and the keys nobody asked for; they know no rule.

Every key goes through `get`, `need`, `many`, `child`, `children` or `items`, whether it stands in
the file or not. So what is left over is unknown, and what was asked for is all that is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from extproc.config.faults import Fault, quoted
from extproc.config.values import Reader, Unfit, did_you_mean, kind

if TYPE_CHECKING:
    from extproc.config.locate import Lines, Path

T = TypeVar("T")
D = TypeVar("D")

Known = Mapping[str, tuple[str, ...]]
"""Keys by the label of their table: `[server]`, `[upstream.ID]`, `[[route]]`; `""` is the root."""

_ABSENT = object()
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Document:
    """What the tables of a file share. Mutable state: the faults, and the tables opened so far."""

    def __init__(self, file: str, lines: Lines) -> None:
        self.file = file
        self.lines = lines
        self.faults: list[Fault] = []
        self.tables: list[Table] = []

    def fault(self, path: Path, problem: str, mend: str, *, at: Path | None = None) -> None:
        """Record a fault of the key at `path`, on its line or on that of `at`."""
        line = self.lines.of(path if at is None else at)
        self.faults.append(Fault(self.file, line, dotted(path), problem, mend))

    def known(self) -> Known:
        """Every key that was asked for."""
        found: dict[str, dict[str, None]] = {}
        for table in self.tables:
            found.setdefault(table.label, {}).update(dict.fromkeys(table.asked))
        return {label: tuple(keys) for label, keys in found.items()}

    def refuse_unknown(self, known: Known) -> None:
        """Record a fault for each key nobody asked for; `known` tells what may have been meant."""
        for table in self.tables:
            for key, value in table.unasked().items():
                what = "unknown table" if isinstance(value, dict) else "unknown key"
                self.fault((*table.path, key), what, _meant(key, table, known))


class Table:
    """Mutable state: the keys asked for, and those of them whose value was refused."""

    def __init__(
        self, document: Document, path: Path, label: str, values: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.label = label
        self.asked: dict[str, None] = {}
        self._document = document
        self._values = values
        self._refused: set[str] = set()
        document.tables.append(self)

    def get(self, key: str, read: Reader[T], default: D) -> T | D:
        """The value of an optional key; the default also stands in for a refused value."""
        value = self._ask(key)
        return default if value is _ABSENT else self._read(key, read, value, default)

    def need(self, key: str, read: Reader[T], stand_in: T, *, mend: str) -> T:
        """The value of a key that must be there."""
        if self._ask(key) is _ABSENT:
            self.fault(key, "is missing", mend)
            return stand_in
        return self.get(key, read, stand_in)

    def many(self, key: str, read: Reader[T], default: tuple[T, ...]) -> tuple[T, ...]:
        """The items of an array that are fit."""
        items = self._ask(key)
        if items is _ABSENT:
            return default
        if not isinstance(items, list):
            self.fault(key, f"is {kind(items)}, not an array", 'write an array, such as ["a", "b"]')
            return default
        read_items = (self._read(key, read, item, None, index) for index, item in enumerate(items))
        return tuple(item for item in read_items if item is not None)

    def child(self, key: str) -> Table:
        """A table of its own; an empty one if there is none."""
        path = (*self.path, key)
        label = f"[{dotted(path)}]"
        values = self._ask(key)
        table = None if values is _ABSENT else self._open(path, label, values)
        return table or Table(self._document, path, label, {})

    def children(self, key: str, placeholder: str, read: Reader[str]) -> dict[str, Table]:
        """Tables under keys that the file chooses, in its order; `read` judges those keys."""
        label = f"[{key}.{placeholder}]"
        values = self._ask(key)
        if values is _ABSENT:
            return {}
        if not isinstance(values, dict):
            self.fault(key, f"is {kind(values)}, not a table", f"write {label}")
            return {}
        for name in values:
            try:
                read(name)
            except Unfit as unfit:
                self._document.fault((*self.path, key, name), unfit.problem, unfit.mend)
        opened = {
            name: self._open((*self.path, key, name), label, table)
            for name, table in values.items()
        }
        return {name: table for name, table in opened.items() if table}

    def items(self, key: str) -> list[Table]:
        """The tables of an array of tables."""
        label = f"[[{key}]]"
        values = self._ask(key)
        if values is _ABSENT:
            return []
        if not isinstance(values, list):
            self.fault(key, f"is {kind(values)}, not an array of tables", f"write {label}")
            return []
        opened = [
            self._open((*self.path, key, index), label, table) for index, table in enumerate(values)
        ]
        return [table for table in opened if table]

    def raw(self, key: str) -> object:
        """The value as it stands, None if there is none; it does not count as asking."""
        return self._values.get(key)

    def given(self, key: str) -> bool:
        return key in self._values

    def fit(self, key: str) -> bool:
        """Whether the value, or the default in its place, can be relied on."""
        return key not in self._refused

    def line(self, key: str) -> int:
        return self._document.lines.of((*self.path, key))

    def fault(self, key: str, problem: str, mend: str, *, at: Path | None = None) -> None:
        self._refused.add(key)
        self._document.fault((*self.path, key), problem, mend, at=at)

    def noted(self, key: str, problem: str, mend: str) -> Fault:
        """The same, but only to be told: nothing is refused."""
        return Fault(self._document.file, self.line(key), dotted((*self.path, key)), problem, mend)

    def unasked(self) -> Mapping[str, object]:
        return {key: value for key, value in self._values.items() if key not in self.asked}

    def _ask(self, key: str) -> object:
        self.asked[key] = None
        return self._values.get(key, _ABSENT)

    def _open(self, path: Path, label: str, values: object) -> Table | None:
        if isinstance(values, dict):
            return Table(self._document, path, label, values)
        self._document.fault(path, f"is {kind(values)}, not a table", f"write it as {label}")
        return None

    def _read(self, key: str, read: Reader[T], value: object, stand_in: D, *index: int) -> T | D:
        try:
            return read(value)
        except Unfit as unfit:
            self._refused.add(key)
            for each in unfit.each:
                self._document.fault((*self.path, key, *index), each.problem, each.mend)
            return stand_in


def dotted(path: Path) -> str:
    """A path as TOML would write it, with array indexes in brackets."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE.fullmatch(part) else quoted(part))
    return text


def _meant(key: str, table: Table, known: Known) -> str:
    elsewhere = [label for label, keys in known.items() if label and key in keys]
    here = known.get(table.label, ())
    if elsewhere:
        return f"move it to {' or '.join(elsewhere)}"
    return did_you_mean(key, here).strip() or f"remove it, or use one of {', '.join(here)}"
