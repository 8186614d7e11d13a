"""Every metric of the sidecar, in an injected registry; labels come from closed sets only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from extproc.core.accounts import Hop
from extproc.core.circuit import State
from extproc.core.errors import Outcome, RouteReason

_DECISION_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip
_HEADERS_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 15, 30, 60)

NO_ROUTE: Final = "none"


class Metrics:
    """Label values that are not of the closed sets given here are refused, never added."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        fallback_metric: str,
        routes: Iterable[str],
        upstream_names: Iterable[str],
    ) -> None:
        self.registry = registry
        self._routes = frozenset(routes)
        self._upstreams = frozenset(upstream_names)
        self._fallbacks = Counter(
            fallback_metric,
            "Steps from one upstream of a chain to the next, by the reason of the first.",
            ["reason", "from", "to"],
            registry=registry,
        )
        self._requests = Counter(
            "pointsman_requests",
            "Requests that reached the listener, each under exactly one outcome.",
            ["outcome"],
            registry=registry,
        )
        self._decisions = Counter(
            "pointsman_decisions",
            "Routing decisions by route and by how it was chosen.",
            ["route", "reason"],
            registry=registry,
        )
        self._decision_seconds = Histogram(
            "pointsman_decision_seconds",
            "From the body's arrival in the sidecar to the decision.",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self._rejections = Counter(
            "pointsman_rejections",
            "Requests that the sidecar refused, by error code.",
            ["code"],
            registry=registry,
        )
        self._internal_errors = Counter(
            "pointsman_internal_errors",
            "Requests passed on undecided because of a fault in the sidecar itself.",
            registry=registry,
        )
        self._time_to_headers = Histogram(
            "pointsman_time_to_headers_seconds",
            "From an attempt's start to the upstream's response headers.",
            ["upstream"],
            buckets=_HEADERS_BUCKETS,
            registry=registry,
        )
        self._embed_seconds = Histogram(
            "pointsman_embed_seconds",
            "Tokenising and running the model, in the worker.",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "pointsman_queue_seconds",
            "Waiting for a worker.",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self._queue_depth = Gauge(
            "pointsman_queue_depth", "Prompts waiting for a worker.", registry=registry
        )
        self._skipped = Counter(
            "pointsman_queue_skipped",
            "Prompts never embedded because their time was up or their caller had gone.",
            ["cause"],
            registry=registry,
        )
        self._worker_restarts = Counter(
            "pointsman_worker_restarts",
            "Workers replaced, by what ended them.",
            ["cause"],
            registry=registry,
        )
        self._circuit_state = Gauge(
            "pointsman_circuit_state",
            "0 closed, 1 half-open, 2 open.",
            ["upstream"],
            registry=registry,
        )
        self._circuit_transitions = Counter(
            "pointsman_circuit_transitions",
            "Changes of an upstream's circuit, by the state entered.",
            ["upstream", "to"],
            registry=registry,
        )
        for outcome in Outcome:
            self._requests.labels(outcome.value)

    def request_ended(self, outcome: Outcome, hops: Iterable[Hop]) -> None:
        self._requests.labels(outcome.value).inc()
        for hop in hops:
            if hop.source in self._upstreams and hop.target in self._upstreams:
                self._fallbacks.labels(hop.reason.value, hop.source, hop.target).inc()

    def decided(self, route: str, reason: str) -> None:
        """One per request record, so that decisions that Envoy gave up on are not counted twice."""
        if route in self._routes and reason in _REASONS:
            self._decisions.labels(route, reason).inc()

    def decision_took(self, seconds: float) -> None:
        self._decision_seconds.observe(seconds)

    def internal_error(self) -> None:
        self._internal_errors.inc()

    def rejected(self, code: str) -> None:
        self._rejections.labels(code).inc()

    def attempt_answered(self, upstream_name: str, time_to_headers_s: float) -> None:
        if upstream_name in self._upstreams:
            self._time_to_headers.labels(upstream_name).observe(time_to_headers_s)

    def watch_circuit(self, upstream_name: str, state: Callable[[], State]) -> None:
        """`state` is read at each scrape, so that an elapsed cooldown shows without traffic."""
        gauge = self._circuit_state.labels(upstream_name)
        gauge.set_function(lambda: _STATE_VALUES[state()])

    def circuit_moved(self, upstream_name: str, to: State) -> None:
        self._circuit_transitions.labels(upstream_name, to.value).inc()

    def queue_depth(self, depth: int) -> None:
        self._queue_depth.set(depth)

    def embedded(self, *, wait_s: float, embed_s: float) -> None:
        self._queue_seconds.observe(wait_s)
        self._embed_seconds.observe(embed_s)

    def skipped(self, cause: StrEnum) -> None:
        self._skipped.labels(cause.value).inc()

    def worker_restarted(self, cause: StrEnum) -> None:
        self._worker_restarts.labels(cause.value).inc()


_STATE_VALUES: Final = {State.CLOSED: 0.0, State.HALF_OPEN: 1.0, State.OPEN: 2.0}
_REASONS: Final = frozenset(reason.value for reason in RouteReason)
