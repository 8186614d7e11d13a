"""One owner of one bounded line of texts and of the workers that embed them; it knows no model.

An idle worker takes the next entry at once; the line (waiting.py) skips whom nobody waits for.
A worker holds one entry at a time, so its death costs exactly that entry; it is then replaced, with
backoff. Liveness is proved by work: an idle worker gets a real text now and then, through the same
socket and the same code as everything else.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from extproc.embedding import link as links
from extproc.embedding.frames import Done, Failed, Job, Ready, Reply, Unable, encode_text
from extproc.embedding.model import ModelError, ModelFiles
from extproc.embedding.text import bound
from extproc.embedding.waiting import (
    LOST,
    Embedded,
    Entry,
    Line,
    LineEvents,
    NotEmbedded,
    Outcome,
    SkipCause,
    running_mean,
)

__all__ = ["Embedded", "NotEmbedded", "Outcome", "Pool", "PoolEvents", "RestartCause", "SkipCause"]

_BACKOFF_FIRST_S: Final = 0.1
_BACKOFF_MAX_S: Final = 5.0
_STABLE_S: Final = 30.0
"""A worker that lived so long starts the backoff anew."""
_TICK_MAX_S: Final = 0.5
_CLOSE_GRACE_S: Final = 2.0
_LEAK_FACTOR: Final = 2
_LEAK_BYTES: Final = 256 << 20
"""A worker that outgrows twice its size when warm by so much is replaced between two entries."""
_ATTEMPTS: Final = 3
_SIZE_OF_ANY: Final = 100
"""Bytes that take as long as what every text costs, whatever its length: 0.3 ms."""
_SIZE_MOST: Final = 1_280
"""Beyond it nothing more is embedded of most texts."""
_PING_TEXT: Final = b"ping"

_log = logging.getLogger(__name__)


class RestartCause(StrEnum):
    """Why a worker was replaced."""

    START = "start"
    """It never became ready."""
    EXIT = "exit"
    SIGNAL = "signal"
    HANG = "hang"
    MEMORY = "memory"
    PROTOCOL = "protocol"


class PoolEvents(LineEvents, Protocol):
    """What the pool reports besides."""

    def worker_restarted(self, cause: RestartCause) -> None:
        """A worker ended by itself or was killed; its replacement follows."""


_Text: TypeAlias = Entry[bytes]


def _size(text: bytes) -> int:
    """What a worker's time goes with, in bytes: within a third the same in English and in Chinese."""
    return _SIZE_OF_ANY + min(len(text), _SIZE_MOST)


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers at one moment; a seat that none of the rest counts is between two workers."""

    seats: int
    busy: int
    idle: int
    starting: int


class _State(Enum):
    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    LOST = auto()
    """Nothing more is sent to it or expected of it but its exit."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One process, from launch to exit; the pool mutates it."""

    started: asyncio.Future[None]
    """Of its seat: done when the first worker there was ready."""
    since: float
    """When it entered its state."""
    state: _State = _State.STARTING
    link: links.Link | None = None
    entry: _Text | None = None
    """What it works on; None while it is busy: a ping."""
    job: int = 0
    cause: RestartCause | None = None
    """Set once its fate is sealed."""
    words: str = ""
    limit_bytes: int = 0
    ready_at: float | None = None


class Pool:
    """Mutable, and only from the event loop: `_line`, `_workers`, `_idle` (a stack), `_closing`,
    `_service_s` and `_service_size` (0 until the first answer), `_warm_up_s` (0 until the first worker
    is ready).

    An entry is in `_line`, or in one worker's `entry`, or answered. While a worker is idle, `_line` is
    empty.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        workers: int,
        queue: int,
        events: PoolEvents,
        hang_timeout_s: float = 5.0,
        ping_interval_s: float = 3.0,
        start_timeout_s: float = 60.0,
        launch: links.Launch = links.launch,
    ) -> None:
        """`queue`: how many entries may wait; beyond it they are refused at once."""
        self._files = files
        self._seats = workers
        self._capacity = queue
        self._events = events
        self._hang_timeout_s = hang_timeout_s
        self._ping_interval_s = ping_interval_s
        self._start_timeout_s = start_timeout_s
        self._launch = launch
        self._tick_s = min(_TICK_MAX_S, hang_timeout_s / 4)
        self._line: Line[bytes] = Line(
            events=events, expected_s=self._expected_s, size_of=_size, take=self._take
        )
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._service_s = 0.0
        self._service_size = 0.0
        self._warm_up_s = 0.0
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        self._ticker: asyncio.TimerHandle | None = None

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when every worker is warm; raises ModelError, with nothing left behind."""
        self._loop = asyncio.get_running_loop()
        started = [self._loop.create_future() for _ in range(self._seats)]
        self._keepers = [self._loop.create_task(self._keep(seat)) for seat in started]
        for keeper in self._keepers:
            keeper.add_done_callback(_report)
        self._schedule_tick()
        try:
            await asyncio.gather(*started)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End every worker; what still waits is answered with degraded_worker."""
        self._closing.set()
        if self._ticker is not None:
            self._ticker.cancel()
        self._line.clear(LOST)
        for worker in self._workers:
            self._retire(worker)
        if not self._keepers:
            return
        _, stuck = await asyncio.wait(self._keepers, timeout=_CLOSE_GRACE_S)
        if stuck:
            for worker in self._workers:
                if worker.link is not None:
                    worker.link.kill()
            await asyncio.wait(stuck)

    def crew(self) -> Crew:
        """A worker that answers a ping counts as idle."""
        states = [worker.state for worker in self._workers]
        busy = sum(worker.entry is not None for worker in self._workers)
        warm = states.count(_State.BUSY) + states.count(_State.IDLE)
        return Crew(self._seats, busy, warm - busy, states.count(_State.STARTING))

    # --- work ------------------------------------------------------------------------------------

    async def embed(self, text: str, *, deadline: float) -> Outcome:
        """Never raises for a failure, never waits past `deadline` (in loop.time() seconds)."""
        return await self._submit(text, deadline=deadline, capacity=self._capacity)

    async def embed_many(self, texts: Sequence[str]) -> list[NDArray[np.float32]]:
        """All of `texts`, in order, however long the queue; raises ModelError. For start-up."""
        outcomes: list[Outcome] = [LOST] * len(texts)
        todo = iter(enumerate(texts))

        async def feed() -> None:
            for index, text in todo:
                for _ in range(_ATTEMPTS):
                    # At most one a seat waits, so these never crowd out the bounded queue.
                    deadline = self._loop.time() + self._start_timeout_s
                    outcome = await self._submit(text, deadline=deadline, capacity=math.inf)
                    outcomes[index] = outcome
                    if isinstance(outcome, Embedded) or self._closing.is_set():
                        break

        await asyncio.gather(*(feed() for _ in range(self._seats)))
        vectors = [outcome.vectors for outcome in outcomes if isinstance(outcome, Embedded)]
        if len(vectors) < len(texts):
            raise ModelError(
                f"{self._files.onnx}: {len(texts) - len(vectors)} of {len(texts)} texts could not "
                "be embedded: the workers died over them; their messages are on stderr"
            )
        return vectors

    async def _submit(self, text: str, *, deadline: float, capacity: float) -> Outcome:
        if self._closing.is_set():
            return LOST
        text_bytes = encode_text(bound(text))
        return await self._line.submit(text_bytes, deadline=deadline, capacity=capacity)

    def _take(self, entry: _Text) -> bool:
        """Whether it need not wait: a worker has it, or nobody ever could."""
        while self._idle:
            if self._hand(self._idle.pop(), entry):
                return True
        if self._is_hopeless(entry):
            entry.answer(LOST)
            return True
        return False

    def _expected_s(self, text: bytes) -> float:
        """Until one more entry would be done. While a worker idles, nobody is refused: so a mean that
        one stall has spoilt mends itself.

        By size, so that a short text is still admitted where a long one would wait in vain. That makes
        more decisions than shortest-first or counting entries (docs/benchmarks.md), and nobody late.
        """
        busy = sum(worker.state is _State.BUSY for worker in self._workers)
        # Those that are busy are half done on average.
        ahead = self._line.size + 0.5 * self._service_size
        return (ahead / max(busy, 1) + _size(text)) * self._service_s / max(self._service_size, 1)

    def _is_hopeless(self, entry: _Text) -> bool:
        """Whether no worker is there, nor can be in time: the caller has something better to do then
        than to wait for its deadline.
        """
        if any(worker.state in (_State.IDLE, _State.BUSY) for worker in self._workers):
            return False
        launched = [worker.since for worker in self._workers if worker.state is _State.STARTING]
        return entry.deadline < min(launched, default=self._loop.time()) + self._warm_up_s

    def _hand(self, worker: _Worker, entry: _Text) -> bool:
        """Give an entry to a worker that has none; False: the worker is dying."""
        now = self._loop.time()
        if not self._send(worker, entry.work, now):
            return False
        worker.entry = entry
        entry.wait_s = now - entry.admitted
        return True

    def _send(self, worker: _Worker, text: bytes, now: float) -> bool:
        worker.job += 1
        worker.since = now
        assert worker.link is not None
        if worker.link.send(Job(worker.job, text)):
            worker.state = _State.BUSY
            return True
        worker.state = _State.LOST
        worker.link.kill()
        return False

    def _free(self, worker: _Worker) -> None:
        """The worker can take an entry: the oldest one, or the next to come."""
        if worker.cause is not None:
            self._retire(worker)
            return
        entry = self._line.next()
        if entry is None:
            worker.state, worker.since = _State.IDLE, self._loop.time()
            self._idle.append(worker)
        elif not self._hand(worker, entry):
            self._line.put_back(entry)

    # --- what workers say --------------------------------------------------------------------------

    def _told(self, worker: _Worker, event: Reply | links.Closed) -> None:
        if (
            isinstance(event, Done | Failed)
            and worker.state is _State.BUSY
            and event.id == worker.job
        ):
            entry, worker.entry = worker.entry, None
            if entry is not None:
                busy_s = self._loop.time() - worker.since
                self._service_s = running_mean(self._service_s, busy_s)
                self._service_size = running_mean(self._service_size, _size(entry.work))
            self._free(worker)  # before the caller wakes: the worker must not wait for it
            if entry is not None:
                self._answer(entry, event)
        elif isinstance(event, Ready) and worker.state is _State.STARTING:
            self._welcome(worker)
        elif isinstance(event, Unable):
            worker.words = event.reason
        elif isinstance(event, links.Closed) and not event.garbled:
            self._lose(worker)
        else:
            self._condemn(worker, RestartCause.PROTOCOL)

    def _answer(self, entry: _Text, reply: Done | Failed) -> None:
        if isinstance(reply, Failed):
            _log.warning("a worker could not embed a text: %s", reply.reason)
            entry.answer(LOST)
            return
        self._events.embedded(wait_s=entry.wait_s, embed_s=reply.embed_s)
        vectors = np.frombuffer(reply.vectors, np.float32).reshape(reply.rows, -1)
        entry.answer(Embedded(vectors, entry.wait_s, reply.embed_s))

    def _welcome(self, worker: _Worker) -> None:
        assert worker.link is not None
        worker.ready_at = self._loop.time()
        self._warm_up_s = worker.ready_at - worker.since
        worker.limit_bytes = _LEAK_FACTOR * worker.link.resident_bytes() + _LEAK_BYTES
        if not worker.started.done():
            worker.started.set_result(None)
        self._free(worker)

    def _condemn(self, worker: _Worker, cause: RestartCause) -> None:
        """Kill it now; its exit does the rest."""
        worker.cause = worker.cause or cause
        if worker.link is not None:
            worker.link.kill()
        self._lose(worker)

    def _retire(self, worker: _Worker) -> None:
        """Let it exit by itself: its socket closes."""
        if worker.link is not None:
            worker.link.close()
        self._lose(worker)

    def _lose(self, worker: _Worker) -> None:
        """Its entry in flight is the only one that its death costs, but for those that had no other
        worker to wait for and no time for its successor.
        """
        entry, worker.entry = worker.entry, None
        if entry is not None:
            entry.answer(LOST)
        if worker.state is _State.IDLE:
            self._idle.remove(worker)
        worker.state, worker.since = _State.LOST, self._loop.time()
        self._line.clear(LOST, which=self._is_hopeless)

    # --- supervision -------------------------------------------------------------------------------

    async def _keep(self, started: asyncio.Future[None]) -> None:
        """One seat: a worker, and after its death the next one, until the pool closes."""
        backoff_s = _BACKOFF_FIRST_S
        while not self._closing.is_set():
            worker = _Worker(started, self._loop.time())
            cause = await self._live(worker)
            if self._closing.is_set():
                break
            if not started.done():
                started.set_exception(ModelError(worker.words))
                break
            lived_s = 0.0 if worker.ready_at is None else self._loop.time() - worker.ready_at
            if lived_s >= _STABLE_S:
                backoff_s = _BACKOFF_FIRST_S
            _log.warning("worker lost: %s; next in %.1f s. %s", cause, backoff_s, worker.words)
            self._events.worker_restarted(cause)
            await self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
        if not started.done():
            started.set_exception(ModelError("the pool was closed while it started"))

    async def _live(self, worker: _Worker) -> RestartCause:
        """One worker from launch to exit."""
        try:
            worker.link = await self._launch(self._files, lambda event: self._told(worker, event))
        except OSError as error:
            worker.words = f"cannot start a worker process: {error}"
            return RestartCause.START
        self._workers.add(worker)
        if self._closing.is_set():
            self._retire(worker)
        status = await worker.link.exited()
        self._workers.remove(worker)
        self._retire(worker)
        if not worker.words:
            worker.words = f"{self._files.onnx}: its worker ended with {_ending(status)}"
        if worker.ready_at is None:
            return RestartCause.START
        return worker.cause or (RestartCause.SIGNAL if status < 0 else RestartCause.EXIT)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past `aclose`."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _schedule_tick(self) -> None:
        due = self._loop.time() + self._tick_s
        self._ticker = self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._schedule_tick()
        now = self._loop.time()
        if now > due + self._tick_s:
            # The loop itself stood still: answers may lie unread in the sockets, so judge nobody.
            return
        for worker in tuple(self._workers):
            self._check(worker, now)

    def _check(self, worker: _Worker, now: float) -> None:
        assert worker.link is not None
        waited_s = now - worker.since
        match worker.state:
            case _State.STARTING if waited_s > self._start_timeout_s:
                worker.words = f"{self._files.onnx}: not loaded within {self._start_timeout_s:g} s"
                self._condemn(worker, RestartCause.START)
            case _State.BUSY if waited_s > self._hang_timeout_s:
                self._condemn(worker, RestartCause.HANG)
            case _State.IDLE if waited_s > self._ping_interval_s:
                self._idle.remove(worker)
                self._send(worker, _PING_TEXT, now)
            case _State.LOST if waited_s > _CLOSE_GRACE_S:
                worker.link.kill()
        if worker.state in (_State.BUSY, _State.IDLE):
            self._check_memory(worker)

    def _check_memory(self, worker: _Worker) -> None:
        assert worker.link is not None
        if worker.link.resident_bytes() > worker.limit_bytes:
            worker.cause = RestartCause.MEMORY
            if worker.state is _State.IDLE:
                self._retire(worker)


def _report(keeper: asyncio.Task[None]) -> None:
    """A keeper never raises; should it, a seat stays empty and somebody must know."""
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        _log.critical("the pool lost a seat", exc_info=error)


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
