"""The bounded line of entries that wait to be embedded, each answered exactly once; it knows no encoder.

Each entry carries its own reply and deadline. One whose caller has gone or whose time is up is
skipped and counted, never handed out; one that would wait in vain is refused at once, and counted
with those. Every failure is a value.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from extproc.core.errors import RouteReason

_WAIT_SHARE: Final = 2 / 3
"""Admit what is expected to be done in this share of its time: the rest is for the estimate's error."""
_SERVICE_WEIGHT: Final = 1 / 16
"""Of the newest in a mean time of service."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Embedded:
    """`vectors`: read-only float32 [k, dimension], k = 1, or 2 for a long text."""

    vectors: NDArray[np.float32]
    wait_s: float
    """In the line, until a worker or a call took it."""
    embed_s: float
    """In the worker: tokenise and run. Of a service: the call."""


@dataclass(frozen=True, slots=True)
class NotEmbedded:
    """Why not: degraded_deadline, degraded_queue_full or degraded_worker."""

    reason: RouteReason


LATE: Final = NotEmbedded(RouteReason.DEGRADED_DEADLINE)
FULL: Final = NotEmbedded(RouteReason.DEGRADED_QUEUE_FULL)
LOST: Final = NotEmbedded(RouteReason.DEGRADED_WORKER)

Outcome = Embedded | NotEmbedded


class SkipCause(StrEnum):
    """Why an entry was never embedded although there was room for it."""

    DEADLINE = "deadline"
    """Its time was up, or would have been before its turn."""
    CALLER_GONE = "caller_gone"


class LineEvents(Protocol):
    """What is reported as it happens; must not raise, and is on the hot path."""

    def queue_depth(self, depth: int) -> None:
        """Entries waiting; told at each change."""

    def embedded(self, *, wait_s: float, embed_s: float) -> None:
        """An entry was embedded, be its caller still there or not."""

    def skipped(self, cause: SkipCause) -> None: ...


class Entry(Generic[T]):
    """Mutable: `reply`, once; `wait_s`, set by who takes it out of the line."""

    __slots__ = ("admitted", "deadline", "reply", "wait_s", "work")

    def __init__(
        self, work: T, *, admitted: float, deadline: float, reply: asyncio.Future[Outcome]
    ) -> None:
        self.work = work
        self.admitted = admitted
        self.deadline = deadline
        self.reply = reply
        self.wait_s = 0.0

    def answer(self, outcome: Outcome) -> None:
        if not self.reply.done():
            self.reply.set_result(outcome)


class Line(Generic[T]):
    """Mutable, and only from the event loop: `_waiting`, and `size`, the sum of what waits there."""

    def __init__(
        self,
        *,
        events: LineEvents,
        expected_s: Callable[[T], float],
        size_of: Callable[[T], int] = lambda _: 1,
        take: Callable[[Entry[T]], bool] = lambda _: False,
    ) -> None:
        """`expected_s`: until this work, behind all that waits, would be done; 0 refuses nobody. `take`:
        give an entry to who can begin with it at once, or answer it; False: it has to wait.
        """
        self._events = events
        self._expected_s = expected_s
        self._size_of = size_of
        self._take = take
        self._waiting: OrderedDict[Entry[T], None] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def submit(self, work: T, *, deadline: float, capacity: float) -> Outcome:
        """Never waits past `deadline` (loop.time() seconds). `capacity`: how many may wait."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= deadline:
            self._events.skipped(SkipCause.DEADLINE)
            return LATE
        entry = Entry(work, admitted=now, deadline=deadline, reply=loop.create_future())
        if (refused := self._admit(entry, capacity)) is not None:
            return refused
        timer = loop.call_at(deadline, self._expire, entry)
        try:
            return await entry.reply
        finally:
            timer.cancel()
            if entry.reply.cancelled():
                self._withdraw(entry, SkipCause.CALLER_GONE)

    def next(self, fits: Callable[[T], bool] = lambda _: True) -> Entry[T] | None:
        """The oldest entry that somebody still waits for, in time; None if it does not fit, too."""
        now = asyncio.get_running_loop().time()
        found = None
        depth = len(self._waiting)
        while self._waiting and found is None:
            entry = next(iter(self._waiting))
            if entry.reply.done():
                self._events.skipped(SkipCause.CALLER_GONE)
            elif now >= entry.deadline:  # its timer is due in this turn of the loop
                entry.answer(LATE)
                self._events.skipped(SkipCause.DEADLINE)
            elif fits(entry.work):
                found = entry
            else:
                break
            self._remove(entry)
        if len(self._waiting) < depth:
            self._events.queue_depth(len(self._waiting))
        return found

    def put_back(self, entry: Entry[T]) -> None:
        """To the head of the line."""
        self._add(entry)
        self._waiting.move_to_end(entry, last=False)
        self._events.queue_depth(len(self._waiting))

    def clear(
        self, outcome: Outcome, *, which: Callable[[Entry[T]], bool] = lambda _: True
    ) -> None:
        """Answer those that wait, or only `which`."""
        those = [entry for entry in self._waiting if which(entry)]
        for entry in those:
            self._remove(entry)
            entry.answer(outcome)
        if those:
            self._events.queue_depth(len(self._waiting))

    def _admit(self, entry: Entry[T], capacity: float) -> NotEmbedded | None:
        if self._take(entry):
            return None
        if len(self._waiting) >= capacity:
            return FULL
        if self._expected_s(entry.work) > _WAIT_SHARE * (entry.deadline - entry.admitted):
            self._events.skipped(SkipCause.DEADLINE)
            return LATE
        self._add(entry)
        self._events.queue_depth(len(self._waiting))
        return None

    def _expire(self, entry: Entry[T]) -> None:
        if not entry.reply.done():
            entry.answer(LATE)
            self._withdraw(entry, SkipCause.DEADLINE)

    def _withdraw(self, entry: Entry[T], cause: SkipCause) -> None:
        """Out of the line; one that was taken already is finished for nobody."""
        if entry in self._waiting:
            self._remove(entry)
            self._events.skipped(cause)
            self._events.queue_depth(len(self._waiting))

    def _add(self, entry: Entry[T]) -> None:
        self._waiting[entry] = None
        self.size += self._size_of(entry.work)

    def _remove(self, entry: Entry[T]) -> None:
        del self._waiting[entry]
        self.size -= self._size_of(entry.work)


def running_mean(mean_s: float, newest_s: float) -> float:
    """`mean_s` 0: there was none before."""
    return mean_s + (_SERVICE_WEIGHT if mean_s else 1.0) * (newest_s - mean_s)
