"""One owner of the line, the calls and the circuit of an embedding service; it speaks no HTTP.

An entry leaves as soon as a call is free, together with what else waits, as far as one call carries:
no timer, so that alone it is not late, and under load calls fill up by themselves. There is no retry
of a call that failed: its entries degrade at once, and the circuit (core/circuit.py) keeps the next
ones from it. While it is open nobody's prompt tries the service: an utterance does, whose vector is
known. So the trial also tells whether that is still the same model, and so does the one in a while
when all is well. Where it is not, the utterances are embedded anew; until then everything degrades.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from extproc.core.circuit import CircuitPolicy, GateBank, State, Ticket
from extproc.core.errors import FallbackReason
from extproc.embedding.batch import Budget, Filling, Work, batches, work_of
from extproc.embedding.service import Failure, Fault
from extproc.embedding.waiting import (
    LATE,
    LOST,
    Embedded,
    Entry,
    Line,
    LineEvents,
    Outcome,
    running_mean,
)

Vectors = NDArray[np.float32]

COOLDOWN_S: Final = 2.0
"""Short, because a trial costs nobody anything."""
_ROUND_S: Final = COOLDOWN_S + 0.05
"""Then the cooldown is over, however coarse the clock."""
_IN_A_ROW: Final = 5
"""Failures without a success between them before the service is left alone. A window, which a success
does not empty, would close on any service that is late once in a thousand calls."""
_POLICY: Final = CircuitPolicy(failure_threshold=1, cooldown_s=COOLDOWN_S, half_open_max_requests=1)
_STALL_S: Final = 0.03
"""A timeout that comes later than this after its time tells of our own loop: it stood still, and the
answer may lie unread."""
_COUNTED: Final = FallbackReason.SERVER_ERROR
"""What the circuit is told of every failure that counts; it asks no further."""
_ID: Final = "service"
_CHECK_S: Final = 30.0
"""Between two looks whether the model is still the same."""
_SAME_COSINE: Final = 0.9
"""Another batch, precision or device moves a vector by a hundredth; another model altogether."""
_LEARN_TIMEOUT_S: Final = 10.0
_BACKOFF_FIRST_S: Final = 0.5
_BACKOFF_MAX_S: Final = 5.0
_TELL_S: Final = 2.0
_FINAL: Final = {Fault.REFUSED, Fault.BAD_SCHEMA}
"""What waiting does not mend, mostly."""

_log = logging.getLogger(__name__)


class Asks(Protocol):
    """The service; see service.py."""

    async def embed(self, texts: Sequence[str], *, timeout_s: float) -> Vectors | Failure: ...


class RemoteEvents(LineEvents, Protocol):
    """What a remote encoder reports besides."""

    def call_sent(self, entries: int) -> None: ...

    def call_failed(self, fault: Fault) -> None: ...

    def service_ready(self, *, ready: bool) -> None:
        """Whether prompts are sent to it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the calls; see [router.encoder]."""

    deadline_s: float
    budget: Budget
    concurrency: int
    queue: int


class Remote:
    """Mutable, and only from the event loop: `_line`, `_calls` in flight, `_known` (what the utterances'
    vectors are, None while that is not known), `_generation` (of `_known`), the circuit in `_bank`,
    `_failure` (the last one, None once all is well), `_row` and `_failed_at` (failures since the last
    success, and when the last of them was known), `_pumping`, and the running means `_call_s` and
    `_share` (of a full call, that an entry takes).
    """

    def __init__(
        self,
        service: Asks,
        utterances: Sequence[str],
        *,
        limits: Limits,
        events: RemoteEvents,
        learned: Callable[[list[Vectors], int], None],
        progress: Callable[[str], None],
    ) -> None:
        """`learned` is told the utterances' vectors, [k, dimension] each, and their generation."""
        self._service = service
        self._utterances = [work_of(text) for text in utterances]
        self._limits = limits
        self._events = events
        self._learned = learned
        self._progress = progress
        self._line: Line[Work] = Line(events=events, expected_s=self._expected_s)
        self._calls: set[asyncio.Task[None]] = set()
        self._known: list[Vectors] | None = None
        self._generation = 0
        self._bank = _new_bank(limits, self._generation)
        self._failure: Failure | None = None
        self._row = 0
        self._failed_at = 0.0
        self._pumping = False
        self._call_s = 0.0
        self._share = 0.0
        self._trouble = asyncio.Event()
        self._settled = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------------

    async def start(self, *, patience_s: float, limit_s: float) -> Failure | None:
        """None: the utterances are embedded. Else why not, after `patience_s` of tries or at once where
        trying does not help, or `limit_s` in all; trying goes on in the background.
        """
        self._loop = asyncio.get_running_loop()
        self._keeper = self._loop.create_task(self._keep(self._loop.time() + patience_s))
        self._keeper.add_done_callback(_report)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._settled.wait()
        if self._known is not None:
            return None
        return self._failure or Failure(Fault.TIMEOUT, f"not done within {limit_s:g} s")

    async def aclose(self) -> None:
        """What still waits is answered with degraded_worker."""
        self._known = None
        self._line.clear(LOST)
        tasks = [*self._calls, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def condition(self) -> str:
        """For a person: empty while prompts are sent to the service, else why not."""
        if self._ready():
            return ""
        return str(self._failure.fault) if self._failure else "utterances not yet embedded"

    # --- work ----------------------------------------------------------------------------------------

    async def embed(self, text: str, *, deadline: float) -> Outcome:
        """Never raises for a failure, never waits past `deadline` (in loop.time() seconds)."""
        if not self._ready():
            return LOST
        if not self._pumping:
            # After this turn of the loop: what arrives in one turn leaves together.
            self._pumping = True
            self._loop.call_soon(self._pump)
        return await self._line.submit(
            work_of(text), deadline=deadline, capacity=self._limits.queue
        )

    def _ready(self) -> bool:
        return self._known is not None and self._bank.state(_ID, self._loop.time()) is State.CLOSED

    def _expected_s(self, _: Work) -> float:
        """Until one more entry would be done. While a call is free, nobody is refused: so a mean that
        one stall has spoilt mends itself.
        """
        ahead = len(self._calls) + len(self._line) * self._share - self._limits.concurrency
        if ahead < 0:
            return 0.0
        # Those in flight are half done on average.
        return ((ahead + 0.5) / self._limits.concurrency + 1) * self._call_s

    def _pump(self) -> None:
        """Fill the calls that are free."""
        self._pumping = False
        if not self._ready():
            return  # `_degrade` has answered those that waited
        while len(self._calls) < self._limits.concurrency:
            filling, entries = Filling(self._limits.budget), list[Entry[Work]]()
            while (entry := self._line.next(filling.fits)) is not None:
                filling.add(entry.work)
                entries.append(entry)
            if not entries:
                return
            self._start(self._call(entries, filling.inputs))

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        _report(task)
        self._pump()

    async def _call(self, entries: Sequence[Entry[Work]], inputs: Sequence[str]) -> None:
        began, generation = self._loop.time(), self._generation
        ticket = self._bank.admit((_ID,), began).ticket
        for entry in entries:
            entry.wait_s = began - entry.admitted
            self._share = running_mean(self._share, self._limits.budget.share(entry.work))
        self._events.call_sent(len(entries))
        outcome = LOST
        try:
            result = await self._service.embed(inputs, timeout_s=self._limits.deadline_s)
            taken_s = self._loop.time() - began
            if isinstance(result, Failure):
                if result.fault is Fault.TIMEOUT:
                    outcome = LATE
                    self._call_s = running_mean(self._call_s, taken_s)
                self._failed(result, ticket, began)
            elif generation == self._generation and self._fits_known(result):
                self._row = 0
                self._call_s = running_mean(self._call_s, taken_s)
                self._deal(entries, result, taken_s)
        finally:
            for entry in entries:
                entry.answer(outcome)

    def _deal(self, entries: Sequence[Entry[Work]], vectors: Vectors, taken_s: float) -> None:
        at = 0
        for entry in entries:
            own = vectors[at : at + len(entry.work.inputs)]
            at += len(own)
            self._events.embedded(wait_s=entry.wait_s, embed_s=taken_s)
            entry.answer(Embedded(own, entry.wait_s, taken_s))

    # --- what goes wrong -----------------------------------------------------------------------------

    def _failed(self, failure: Failure, ticket: Ticket, began: float) -> None:
        self._count(failure)
        _log.warning("embedding service: %s: %s", failure.fault, failure.words)
        now = self._loop.time()
        stalled = (
            failure.fault is Fault.TIMEOUT and now - began > self._limits.deadline_s + _STALL_S
        )
        if failure.fault is Fault.REFUSED or stalled:
            # A text that it does not take must not keep out the others; nor must our own stall.
            self._bank.abandoned(_ID, ticket)
            return
        # Calls in flight together fail for one reason, together. A trial is one more in the row.
        if began >= self._failed_at:
            self._row += 1
            self._failed_at = now
        if self._row >= _IN_A_ROW and self._bank.failed(_ID, _COUNTED, ticket, now):
            _log.warning("embedding service: left alone until a trial succeeds")
            self._degrade()

    def _fits_known(self, vectors: Vectors) -> bool:
        known = self._known
        if known is None or vectors.shape[1] == known[0].shape[1]:
            return known is not None
        self._forget(f"vectors of {vectors.shape[1]} columns, not {known[0].shape[1]}")
        return False

    def _forget(self, why: str) -> None:
        """It runs another model: what is known of the utterances is worth nothing."""
        self._count(Failure(Fault.BAD_SCHEMA, why))
        _log.warning("embedding service: another model: %s; embedding the utterances anew", why)
        self._known = None
        self._generation += 1
        self._degrade()

    def _degrade(self) -> None:
        self._line.clear(LOST)
        self._events.service_ready(ready=False)
        self._trouble.set()

    def _count(self, failure: Failure) -> None:
        self._failure = failure
        self._events.call_failed(failure.fault)

    # --- in the background ---------------------------------------------------------------------------

    async def _keep(self, patient_until: float) -> None:
        """The utterances' vectors, at first and whenever they are worth nothing; and the trials."""
        backoff_s = 0.0
        while True:
            self._trouble.clear()
            try:
                if self._known is None:
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(max(2 * backoff_s, _BACKOFF_FIRST_S), _BACKOFF_MAX_S)
                    await self._learn()
                    self._settle(patient_until)
                elif self._bank.state(_ID, self._loop.time()) is not State.OPEN:
                    await self._check()
                    if self._ready():
                        backoff_s = 0.0
            except Exception:  # noqa: BLE001  the task's boundary: the next round may do better
                _log.exception("embedding service: a round in the background failed")
            pause_s = _CHECK_S if self._ready() else _ROUND_S
            if self._known is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._trouble.wait()

    def _settle(self, patient_until: float) -> None:
        """Whether who started us has waited for long enough."""
        failure = self._failure
        is_final = failure is not None and failure.fault in _FINAL
        if self._known is not None or is_final or self._loop.time() >= patient_until:
            self._settled.set()

    async def _check(self) -> None:
        """Ask for a vector that is known; in a half-open circuit that is the trial."""
        known = self._known
        assert known is not None
        was_ready = self._ready()
        began = self._loop.time()
        ticket = self._bank.admit((_ID,), began).ticket
        result = await self._service.embed(
            self._utterances[0].inputs, timeout_s=self._limits.deadline_s
        )
        if self._known is not known:
            self._bank.abandoned(_ID, ticket)
        elif isinstance(result, Failure):
            self._failed(result, ticket, began)
        elif self._fits_known(result):
            self._row = 0
            cosine = float((result * known[0]).sum(axis=1).min())
            if cosine < _SAME_COSINE:
                self._forget(f"a known text has another vector (cosine {cosine:.2f})")
            if self._bank.succeeded(_ID, ticket, self._loop.time()):
                _log.info("embedding service: answers again")
        if self._ready() and not was_ready:
            self._failure = None
            self._events.service_ready(ready=True)

    async def _learn(self) -> None:
        """Embed the utterances: `_known`, or `_failure`."""
        todo = enumerate(batches(self._utterances, self._limits.budget))
        found: dict[int, list[Vectors]] = {}
        done = 0
        due = self._loop.time() + _TELL_S
        failures: list[Failure] = []

        async def feed() -> None:
            nonlocal done, due
            for at, batch in todo:
                if failures:
                    return
                inputs = [text for work in batch for text in work.inputs]
                result = await self._service.embed(inputs, timeout_s=_LEARN_TIMEOUT_S)
                if isinstance(result, Failure):
                    failures.append(result)
                    return
                ends = np.cumsum([len(work.inputs) for work in batch])[:-1]
                found[at] = np.split(result, ends)
                done += len(batch)
                if self._loop.time() >= due:
                    due += _TELL_S
                    self._progress(f"embedded {done:,} of {len(self._utterances):,} utterances")

        await asyncio.gather(*(feed() for _ in range(self._limits.concurrency)))
        known = [vectors for at in sorted(found) for vectors in found[at]]
        if not failures and len({vectors.shape[1] for vectors in known}) > 1:
            words = "vectors of several lengths: several models behind one address"
            failures.append(Failure(Fault.BAD_SCHEMA, words))
        if failures:
            self._count(failures[0])
            return
        self._learned(known, self._generation)
        # All of these calls succeeded: the circuit begins anew, and old tickets mean nothing to it.
        self._bank = _new_bank(self._limits, self._generation)
        self._row = 0
        self._known = known
        self._failure = None
        self._events.service_ready(ready=True)


def _new_bank(limits: Limits, generation: int) -> GateBank:
    return GateBank(_POLICY, {_ID: limits.deadline_s + COOLDOWN_S}, run=str(generation))


def _report(task: asyncio.Task[None]) -> None:
    """Neither calls nor the keeper raise; should one, somebody must know."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("a task of the remote encoder ended", exc_info=error)
