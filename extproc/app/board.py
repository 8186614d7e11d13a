"""What the status page shows, live: taken on the serving loop, read on the admin listener's thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Final, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Metric

from extproc.app.audit import Audit, weigh
from extproc.app.decide import Told, decide
from extproc.app.status import (
    POINTS,
    STEP_S,
    Facts,
    Labels,
    Look,
    Point,
    document,
    judge_audit,
    point,
)
from extproc.config import Config
from extproc.core.exchange import Plan
from extproc.embedding.pool import Crew
from extproc.serving.envoy_stats import EnvoyStats
from extproc.serving.events import Feed
from extproc.serving.gate import Gate
from extproc.serving.page import NotYetError, TooManyTriesError
from extproc.serving.servicer import Embed

_TICK_S: Final = 0.5
_FRESH_S: Final = 0.5
"""Younger than that, a document is good for the next viewer too."""
_TRY_EVERY_S: Final = 0.1
"""One prompt is tried at a time, and so often at most: workers are there for requests."""

_log = logging.getLogger(__name__)


class Collects(Protocol):
    """A registry, or the part of one that is of interest."""

    def collect(self) -> Iterable[Metric]: ...


class Board:
    """Mutable state. Of the serving loop: `_history`, `_points`, `_labels`, `_audit*`, `_trying`,
    `_tried_s`, `_gate`, `_crew`, `_encoder`, `_try`. Of the admin thread: `_built`. One leaves `_facts`
    and `_told` for the other, each replaced whole.
    """

    def __init__(
        self,
        config: Config,
        registry: CollectorRegistry,
        feed: Feed,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """To be made on the serving loop. `clock`: monotonic seconds."""
        self._clock = clock
        self._config = config
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        fallbacks = config.fallback.metric_prefix.removesuffix("_total") + "_total"
        self._for_history = registry.restricted_registry([*_HISTORY, fallbacks])
        self._for_document = registry.restricted_registry([*_HISTORY, *_DOCUMENT, fallbacks])
        self._for_audit = registry.restricted_registry(list(_AUDIT))
        self._began_s = clock()
        self._facts = Facts(self._began_s)
        self._history: deque[Look] = deque(maxlen=POINTS + 1)
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._told: tuple[tuple[Look, ...], tuple[Point, ...]] = ((), ())
        self._labels: dict[Labels, Labels] = {}
        self._audit: Audit | None = None
        self._audit_state = "unknown" if config.foreign is None else "none"
        self._audit_at_s: float | None = None
        self._gate: Gate | None = None
        self._crew: Callable[[], Crew] | None = None
        self._encoder: Callable[[], str] = lambda: ""
        self._try: Callable[[bytes], Awaitable[Told]] | None = None
        self._trying = False
        self._tried_s = float("-inf")
        self._built: tuple[float, bytes] = (float("-inf"), b"")

    # --- on the serving loop ------------------------------------------------------------------------

    def serves(
        self,
        *,
        gate: Gate,
        crew: Callable[[], Crew],
        plan: Plan,
        embed: Embed,
        encoder: Callable[[], str] = lambda: "",
    ) -> None:
        """From now on there is something to show. `embed` must remember no prompt."""
        self._gate = gate
        self._crew = crew
        self._encoder = encoder
        patience_s = self._config.router.deadline_s

        async def try_out(body: bytes) -> Told:
            return await decide(plan, embed, body, patience_s=patience_s, score_anyway=True)

        self._try = try_out

    def envoy_read(self, stats: EnvoyStats | None) -> None:
        """Told at each reading, so that both sides of the account are of one moment."""
        if stats is None:
            self._audit_state = "unknown"
            return
        found = weigh(stats, look(self._for_audit, 0.0).flat())
        self._audit_state = judge_audit(found, self._audit)
        self._audit = found
        self._audit_at_s = self._clock()

    async def run(self) -> None:
        """Tell of the serving loop every half second, for ever."""
        while True:
            try:
                self.tick()
            except Exception:  # noqa: BLE001  the task's boundary: a page must not cost more than itself
                _log.exception("the status page is not up to date")
            await asyncio.sleep(_TICK_S)

    def tick(self) -> None:
        now_s = self._clock()
        self._facts = Facts(
            at_s=now_s,
            ready=self._gate is not None,
            circuits=self._gate.circuits() if self._gate is not None else {},
            crew=self._crew() if self._crew is not None else None,
            encoder=self._encoder(),
            audit=self._audit,
            audit_state=self._audit_state,
            audit_at_s=self._audit_at_s,
            last=self._feed.last(),
        )
        if not self._history or now_s - self._history[-1].at_s >= STEP_S - _TICK_S / 2:
            found = look(self._for_history, now_s, self._labels)
            if self._history:
                self._points.append(point(self._history[-1], found))
            self._history.append(found)
            self._told = (tuple(self._history), tuple(self._points))

    async def _tried(self, body: bytes) -> tuple[int, bytes]:
        if self._try is None:
            raise NotYetError
        if self._trying or self._clock() - self._tried_s < _TRY_EVERY_S:
            raise TooManyTriesError
        self._trying = True
        try:
            told = await self._try(body)
        finally:
            self._trying = False
            self._tried_s = self._clock()
        return told.status, msgspec.json.encode(told.answer)

    # --- on the admin listener's thread -------------------------------------------------------------

    def document(self) -> bytes:
        """GET /status.json."""
        now_s = self._clock()
        built_s, built = self._built
        if now_s - built_s >= _FRESH_S:
            whole = document(
                self._config,
                self._facts,
                *self._told,
                look(self._for_document, now_s),
                wall_s=time.time(),
                up_s=now_s - self._began_s,
            )
            built = msgspec.json.encode(whole)
            self._built = (now_s, built)
        return built

    def decide(self, body: bytes) -> Future[tuple[int, bytes]]:
        """POST /route, on the serving loop; fails with NotYetError or TooManyTriesError."""
        return asyncio.run_coroutine_threadsafe(self._tried(body), self._loop)


def look(registry: Collects, at_s: float, known: dict[Labels, Labels] | None = None) -> Look:
    """The registry as it is now, at `at_s`; its values are safe to read from any thread.

    `known`: labels, shared among looks that are kept, or each would weigh several times as much.
    """
    found: dict[str, dict[Labels, float]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            labels = frozenset(sample.labels.items())
            own = found.setdefault(sample.name, {})
            own[labels if known is None else known.setdefault(labels, labels)] = sample.value
    return Look(at_s, found)


_AUDIT: Final = (
    "pointsman_requests_total",
    "pointsman_requests_unseen_total",
    "pointsman_account_offset",
    "pointsman_decisions_total",
    "pointsman_internal_errors_total",
    "pointsman_records_total",
    "pointsman_records_lost_total",
)
_HISTORY: Final = (
    "pointsman_requests_total",
    "pointsman_decisions_total",
    "pointsman_internal_errors_total",
    "pointsman_decision_seconds_bucket",
    "pointsman_queue_depth",
    "pointsman_queue_seconds_bucket",
    "pointsman_embed_seconds_bucket",
    "pointsman_worker_restarts_total",
    "pointsman_circuit_transitions_total",
    "pointsman_time_to_headers_seconds_bucket",
)
_DOCUMENT: Final = (
    "pointsman_client_keys_refused",
    "pointsman_static_encoder_ready",
    "pointsman_tokens_total",
)
