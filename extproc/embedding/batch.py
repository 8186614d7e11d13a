"""What of a text a service is asked for, what that costs, and how much goes into one call. Pure.

There is no tokeniser here: tokens are estimated from characters, and texts are cut by the estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from extproc.embedding.text import END_TOKENS, MAX_TOKENS, bound, lines, paragraphs

_MARKS: Final = 2
"""Tokens that a model puts around each text."""
_ASCII: Final = 0.25
_OTHER: Final = 0.5
_WIDE: Final = 1.0
"""Tokens a character: English and code, other alphabets, and from U+2E80 on Chinese, Japanese, Korean
and emoji."""
_FIRST_OTHER: Final = 0x80
_FIRST_WIDE: Final = 0x2E80
_STAND_IN: Final = "?"
"""For a blank text: services refuse it, and with it the whole call."""


@dataclass(frozen=True, slots=True)
class Work:
    """One text as a service gets it: itself, or the two ends of a long one."""

    inputs: tuple[str, ...]
    tokens: int
    """Of all `inputs`, estimated."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that one call carries; a single text may exceed it."""

    tokens: int
    inputs: int

    def share(self, work: Work) -> float:
        """Of a full call."""
        return max(work.tokens / self.tokens, len(work.inputs) / self.inputs)


class Filling:
    """One call being filled. Mutable: what it holds so far."""

    __slots__ = ("_budget", "inputs", "tokens")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.inputs: list[str] = []
        self.tokens = 0

    def fits(self, work: Work) -> bool:
        return not self.inputs or (
            self.tokens + work.tokens <= self._budget.tokens
            and len(self.inputs) + len(work.inputs) <= self._budget.inputs
        )

    def add(self, work: Work) -> None:
        self.inputs += work.inputs
        self.tokens += work.tokens


def batches(works: Iterable[Work], budget: Budget) -> Iterator[list[Work]]:
    """All of `works`, in order, in calls as full as they may be."""
    filling, batch = Filling(budget), list[Work]()
    for work in works:
        if not filling.fits(work):
            yield batch
            filling, batch = Filling(budget), []
        filling.add(work)
        batch.append(work)
    if batch:
        yield batch


def work_of(text: str) -> Work:
    """Any str is safe. The same parts that the local encoder chooses, cut by characters."""
    text = bound(text).encode("utf-8", "replace").decode()
    costs = _costs(text)
    if float(costs.sum()) + _MARKS <= MAX_TOKENS:
        return _work(text)
    parts = paragraphs(text)
    return _work(_end(parts[0], first=True), _end(parts[-1], first=False))


def _end(paragraph: str, *, first: bool) -> str:
    """A paragraph, or its first or last line when all of it is too long, and of that the outer end."""
    if float(_costs(paragraph).sum()) + _MARKS > END_TOKENS:
        paragraph = lines(paragraph)[0 if first else -1]
    costs = _costs(paragraph)
    sums = np.cumsum(costs if first else costs[::-1])
    kept = int(np.searchsorted(sums, END_TOKENS - _MARKS, side="right"))
    return paragraph[:kept] if first else paragraph[len(paragraph) - kept :]


def _work(*texts: str) -> Work:
    inputs = tuple(text if text and not text.isspace() else _STAND_IN for text in texts)
    tokens = sum(float(_costs(text).sum()) for text in inputs) + _MARKS * len(inputs)
    return Work(inputs, max(1, round(tokens)))


def _costs(text: str) -> NDArray[np.float64]:
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return np.where(points < _FIRST_OTHER, _ASCII, np.where(points < _FIRST_WIDE, _OTHER, _WIDE))
