"""Every metric of the sidecar, in an injected registry; labels come from closed sets only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from itertools import product
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from extproc.core.accounts import AttemptRecord, Hop
from extproc.core.circuit import State
from extproc.core.errors import Outcome, RouteReason
from extproc.core.ledger import Found, Tally, UnseenCause

_DECISION_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
_GAP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_HEADERS_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 15, 30, 60)

NO_ROUTE: Final = "none"


_Child = TypeVar("_Child", Counter, Histogram)


def _children(metric: _Child) -> Callable[..., _Child]:
    """Labels -> the child that counts them, looked up once: the library's own way costs more than
    counting, for what every request touches. All are of closed sets, so they are few.
    """
    return cache(metric.labels)


class RecordKind(StrEnum):
    REQUEST = "request"
    ATTEMPT = "attempt"
    INTERIM = "interim"


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
        self._requests_of = _children(
            Counter(
                "pointsman_requests",
                "Requests that reached the listener, each under exactly one outcome.",
                ["outcome"],
                registry=registry,
            )
        )
        self._unseen = Counter(
            "pointsman_requests_unseen",
            "Requests that ended in Envoy and of which no record reached the sidecar, by cause.",
            ["cause"],
            registry=registry,
        )
        self._records_of = _children(
            Counter(
                "pointsman_records",
                "Access log records received; interim ones tell of attempts still under way.",
                ["kind"],
                registry=registry,
            )
        )
        self._records_lost = Counter(
            "pointsman_records_lost",
            "Access log records that Envoy wrote and that never arrived.",
            registry=registry,
        )
        self._offset = Gauge(
            "pointsman_account_offset",
            "What earlier runs counted of the running Envoy, less what this one did of former ones.",
            ["of"],
            registry=registry,
        )
        self._envoy_reads = Counter(
            "pointsman_envoy_reads",
            "Readings of Envoy's own counters, which the accounts are compared with.",
            ["result"],
            registry=registry,
        )
        self._key_reloads = Counter(
            "pointsman_client_key_reloads",
            "Changed files of client keys, by whether they came into force.",
            ["result"],
            registry=registry,
        )
        self._keys_refused = Gauge(
            "pointsman_client_keys_refused",
            "1 while the file of clients' keys has a fault, and the keys from before are in force.",
            registry=registry,
        )
        self._decisions_of = _children(
            Counter(
                "pointsman_decisions",
                "Routing decisions by route and by how it was chosen.",
                ["route", "reason"],
                registry=registry,
            )
        )
        self._decision_seconds = Histogram(
            "pointsman_decision_seconds",
            "From the body's arrival in the sidecar to the decision.",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self._deadline = Gauge(
            "pointsman_decision_deadline_seconds",
            "The limit on a decision, [router] deadline; past it the default route is taken.",
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
        self._time_to_headers_of = _children(
            Histogram(
                "pointsman_time_to_headers_seconds",
                "From an attempt's start to the upstream's response headers.",
                ["upstream"],
                buckets=_HEADERS_BUCKETS,
                registry=registry,
            )
        )
        self._time_to_first_token_of = _children(
            Histogram(
                "pointsman_time_to_first_token_seconds",
                "Of streams: from an attempt's start to the first chunk of the body.",
                ["upstream"],
                buckets=_HEADERS_BUCKETS,
                registry=registry,
            )
        )
        self._token_gap_of = _children(
            Histogram(
                "pointsman_token_gap_seconds",
                "Of streams that report their usage: mean time between two tokens, one value a stream.",
                ["upstream"],
                buckets=_GAP_BUCKETS,
                registry=registry,
            )
        )
        self._tokens_of = _children(
            Counter(
                "pointsman_tokens",
                "Tokens as the upstream reports them, by kind: prompt or completion.",
                ["upstream", "route", "kind"],
                registry=registry,
            )
        )
        self._answers_of = _children(
            Counter(
                "pointsman_answers",
                "Answers with status 200, by whether they reported their usage.",
                ["upstream", "usage"],
                registry=registry,
            )
        )
        self._embed_seconds = Histogram(
            "pointsman_embed_seconds",
            "Tokenising and running the model, in the worker; with an embedding service, the call.",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self._embed_batch_size = Histogram(
            "pointsman_embed_batch_size",
            "With an embedding service: prompts in one call.",
            buckets=_BATCH_BUCKETS,
            registry=registry,
        )
        self._embedding_failures = Counter(
            "pointsman_embedding_failures",
            "With an embedding service: calls that gave no vectors, by cause.",
            ["cause"],
            registry=registry,
        )
        self._service_ready = Gauge(
            "pointsman_embedding_service_ready",
            "1 while prompts are sent to the embedding service; 0 while it is left alone, or without one.",
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "pointsman_queue_seconds",
            "Waiting for a worker, or for a call to the embedding service.",
            buckets=_DECISION_BUCKETS,
            registry=registry,
        )
        self._queue_depth = Gauge(
            "pointsman_queue_depth",
            "Prompts waiting for a worker, or for a call to the embedding service.",
            registry=registry,
        )
        self._queue_limit = Gauge(
            "pointsman_queue_limit",
            "The most prompts that may wait for a worker, [router] queue.",
            registry=registry,
        )
        self._skipped = Counter(
            "pointsman_queue_skipped",
            "Prompts never embedded because their time was up or their caller had gone.",
            ["cause"],
            registry=registry,
        )
        self._cache_lookups_of = _children(
            Counter(
                "pointsman_decision_cache",
                "Prompts looked up among the remembered decisions, by whether one was there.",
                ["result"],
                registry=registry,
            )
        )
        self._cascade = Counter(
            "pointsman_cascade",
            "With [router] cascade: prompts by the encoder that decided, static where it was sure.",
            ["encoder"],
            registry=registry,
        )
        self._static_ready = Gauge(
            "pointsman_static_encoder_ready",
            "1 once the static encoder can stand in for the embedding model.",
            registry=registry,
        )
        self._workers = Gauge(
            "pointsman_workers",
            "Worker processes that the sidecar keeps; 0 where no route has utterances.",
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
            self._requests_of(outcome.value)
        for cause in UnseenCause:
            self._unseen.labels(cause.value)
        for kind in RecordKind:
            self._records_of(kind.value)
        for result in ("ok", "failed"):
            self._envoy_reads.labels(result)
            self._key_reloads.labels(result)
        for result in ("hit", "miss"):
            self._cache_lookups_of(result)
        for encoder in ("static", "full"):
            self._cascade.labels(encoder)
        for route, reason in product(self._routes, _DEGRADED):
            self._decisions_of(route, reason)
        for upstream, usage in product(self._upstreams, ("reported", "absent")):
            self._answers_of(upstream, usage)
        self.account_offset(Tally())

    def limits(self, *, deadline_s: float, queue: int, workers: int) -> None:
        """What the configuration allows, so that no alert or panel has to repeat it."""
        self._deadline.set(deadline_s)
        self._queue_limit.set(queue)
        self._workers.set(workers)

    def may_happen(self, *, restarts: Iterable[StrEnum], skips: Iterable[StrEnum]) -> None:
        """Show each cause at 0: Prometheus cannot see the rise of what begins with its first event."""
        for cause in restarts:
            self._worker_restarts.labels(cause.value)
        for cause in skips:
            self._skipped.labels(cause.value)

    def request_ended(self, outcome: Outcome, hops: Iterable[Hop]) -> None:
        self._requests_of(outcome.value).inc()
        for hop in hops:
            if hop.source in self._upstreams and hop.target in self._upstreams:
                self._fallbacks.labels(hop.reason.value, hop.source, hop.target).inc()

    def record_received(self, kind: RecordKind) -> None:
        self._records_of(kind.value).inc()

    def requests_unseen(self, found: Found) -> None:
        self._unseen.labels(UnseenCause.BYPASSED.value).inc(found.bypassed)
        self._unseen.labels(UnseenCause.RECORD_LOST.value).inc(found.record_lost)
        self._records_lost.inc(found.records)

    def account_offset(self, offset: Tally) -> None:
        self._offset.labels("requests").set(offset.requests)
        self._offset.labels("bypassed").set(offset.let_through)
        self._offset.labels("records").set(offset.records)

    def envoy_read(self, *, ok: bool) -> None:
        self._envoy_reads.labels("ok" if ok else "failed").inc()

    def keys_reloaded(self, *, ok: bool) -> None:
        self._key_reloads.labels("ok" if ok else "failed").inc()
        self._keys_refused.set(0 if ok else 1)

    def decided(self, route: str, reason: str) -> None:
        """One per request record, so that decisions that Envoy gave up on are not counted twice."""
        if route in self._routes and reason in _REASONS:
            self._decisions_of(route, reason).inc()

    def decision_took(self, seconds: float) -> None:
        self._decision_seconds.observe(seconds)

    def internal_error(self) -> None:
        self._internal_errors.inc()

    def rejected(self, code: str) -> None:
        self._rejections.labels(code).inc()

    def attempt_answered(self, upstream_name: str, record: AttemptRecord) -> None:
        if upstream_name not in self._upstreams:
            return
        if record.time_to_headers_s is not None:
            self._time_to_headers_of(upstream_name).observe(record.time_to_headers_s)
        if record.is_stream and record.time_to_first_chunk_s is not None:
            self._time_to_first_token_of(upstream_name).observe(record.time_to_first_chunk_s)
        if record.token_gap_s is not None:
            self._token_gap_of(upstream_name).observe(record.token_gap_s)
        if record.route not in self._routes:
            return
        counts = {"prompt": record.prompt_tokens, "completion": record.completion_tokens}
        for kind, count in counts.items():
            if count is not None:
                self._tokens_of(upstream_name, record.route, kind).inc(count)
        if record.status == 200:
            usage = "absent" if record.prompt_tokens is None else "reported"
            self._answers_of(upstream_name, usage).inc()

    def watch_circuit(self, upstream_name: str, state: Callable[[], State]) -> None:
        """`state` is read at each scrape, so that an elapsed cooldown shows without traffic."""
        for to in State:
            self._circuit_transitions.labels(upstream_name, to.value)
        gauge = self._circuit_state.labels(upstream_name)
        gauge.set_function(lambda: _STATE_VALUES[state()])

    def circuit_moved(self, upstream_name: str, to: State) -> None:
        self._circuit_transitions.labels(upstream_name, to.value).inc()

    def queue_depth(self, depth: int) -> None:
        self._queue_depth.set(depth)

    def embedded(self, *, wait_s: float, embed_s: float) -> None:
        self._queue_seconds.observe(wait_s)
        self._embed_seconds.observe(embed_s)

    def call_sent(self, entries: int) -> None:
        self._embed_batch_size.observe(entries)

    def call_failed(self, fault: StrEnum) -> None:
        self._embedding_failures.labels(fault.value).inc()

    def service_ready(self, *, ready: bool) -> None:
        self._service_ready.set(ready)

    def cache_looked_up(self, *, hit: bool) -> None:
        self._cache_lookups_of("hit" if hit else "miss").inc()

    def cascaded(self, *, static: bool) -> None:
        self._cascade.labels("static" if static else "full").inc()

    def static_encoder_ready(self) -> None:
        self._static_ready.set(1)

    def skipped(self, cause: StrEnum) -> None:
        self._skipped.labels(cause.value).inc()

    def worker_restarted(self, cause: StrEnum) -> None:
        self._worker_restarts.labels(cause.value).inc()


_STATE_VALUES: Final = {State.CLOSED: 0.0, State.HALF_OPEN: 1.0, State.OPEN: 2.0}
_REASONS: Final = frozenset(reason.value for reason in RouteReason)
_DEGRADED: Final = frozenset(each for each in _REASONS if each.startswith("degraded_"))
