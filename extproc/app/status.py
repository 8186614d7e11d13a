"""The status document of page and scripts, built from values; it reads no clock, registry or loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from extproc.app.audit import Audit, as_json
from extproc.config import Config, route_chain
from extproc.core.accounts import RequestRecord
from extproc.core.circuit import CircuitView, State
from extproc.core.errors import Outcome, RouteReason
from extproc.core.wire_names import RULE
from extproc.embedding.pool import Crew
from extproc.serving.events import describe

SCHEMA: Final = 1
"""Goes up when a key goes away or changes its meaning; new keys may come at any time."""
STEP_S: Final = 2.0
"""Of the history."""
POINTS: Final = 150
RATE_S: Final = 10.0
ALERT_S: Final = 60.0
"""What happened longer ago raises no alert."""
STUCK_S: Final = 3.0
"""What the serving loop tells every half second is missing for so long."""
_NEARLY_FULL: Final = 0.8

FIELDS: Final = {
    "schema": f"{SCHEMA}; goes up when a key goes away or changes its meaning",
    "state": "`starting`, `ok`, `degraded` or `failing`, by the worst of `alerts`",
    "alerts": "what a person should know now: `code`, `level` (`info`, `warning`, `critical`), "
    "`subject`, `text`",
    "now_s": "when, in seconds since 1970",
    "up_s": "since the sidecar began",
    "loop_age_s": f"since the serving loop told of itself; over {STUCK_S:g} s it is stuck",
    "window_s": f"what `recent` covers everywhere: {STEP_S * POINTS:g} s, or less after a start",
    "config": "`gateway` (its URL; empty with [extproc] listen), `deadline_s` of a decision, "
    "`default` route, the circuits' `policy`",
    "requests": f"`rate` a second over {RATE_S:g} s, `recent`, `total`, and both by `outcomes`",
    "routes": "for each route whom it tries in order (`upstreams`), `recent`, `total`, "
    "and both by `reasons`",
    "upstreams": "for each upstream `model`, `circuit` (`state`, `half_open_in_s`, `failures`, "
    "`trials`, `opened`), `answered`, `went_on` (attempts after which the next one was asked), "
    "recent `headers_p50_s` and `headers_p95_s`, `tokens`",
    "fallbacks": "steps to the next upstream: `reason`, `from`, `to`, `recent`, `total`",
    "decisions": "`count`, recent `p50_s`, `p95_s`, `p99_s` (interpolated from the histogram), "
    f"`degraded` by reason in the last {ALERT_S:g} s",
    "queue": "`depth`, `limit`, recent `wait_p95_s`: prompts that wait for a worker",
    "workers": "`seats`, `busy`, `idle`, `starting`, `restarts` by cause, `embed_p50_s`, "
    "`static_encoder`; `seats` is 0 where no route has utterances",
    "audit": "`state` (`adds_up`; `settling`: records are under way; `differs`; `unknown`: Envoy "
    "does not answer; `none`: another Envoy carries the requests), `age_s`, "
    "and `checks` and `beside` of `pointsman audit --json`",
    "history": f"columns, an entry every {STEP_S:g} s, the oldest first: `ago_s`, requests a second "
    "(`served`, `fallback`, `rule`, `lost`, `other`), `p50_s`, `p95_s`, `p99_s`, `queue`",
    "last_requests": "the newest first, each as in `GET /events`",
}

Labels: TypeAlias = "frozenset[tuple[str, str]]"
Samples: TypeAlias = Mapping[str, Mapping[Labels, float]]
"""By the sample's name."""

_KINDS: Final = {
    "served": (Outcome.SERVED,),
    "fallback": (Outcome.SERVED_BY_FALLBACK,),
    "rule": (Outcome.SERVED_BY_RULE,),
    "lost": (Outcome.FAILED, Outcome.STREAM_CUT),
}
COLUMNS: Final = (*_KINDS, "other", "p50_s", "p95_s", "p99_s", "queue")
_LEVELS: Final = ("info", "warning", "critical")


@dataclass(frozen=True, slots=True)
class Look:
    """The samples of the registry at one moment."""

    at_s: float
    samples: Samples = field(default_factory=dict)

    def flat(self) -> dict[tuple[str, Labels], float]:
        return {
            (name, labels): value
            for name, own in self.samples.items()
            for labels, value in own.items()
        }

    def sum(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(value for had, value in self.samples.get(name, _NONE).items() if wanted <= had)

    def values(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of one label."""
        wanted = labels.items()
        found: dict[str, float] = {}
        for had, value in self.samples.get(name, _NONE).items():
            if wanted <= had:
                key = dict(had).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found


_NONE: Final[Mapping[Labels, float]] = {}


@dataclass(frozen=True, slots=True)
class Facts:
    """What only the serving loop knows, all of one moment."""

    at_s: float
    ready: bool = False
    circuits: Mapping[str, CircuitView] = field(default_factory=dict)
    """By the upstream's name."""
    crew: Crew | None = None
    encoder: str = ""
    """Why no prompt is sent to the embedding service; empty: all is well, or there is none."""
    audit: Audit | None = None
    audit_state: str = "unknown"
    audit_at_s: float | None = None
    last: tuple[RequestRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Alert:
    code: str
    level: str
    text: str
    subject: str = ""


def judge_audit(found: Audit, before: Audit | None) -> str:
    """Compare two readings, 2 s apart: a record travels for milliseconds.

    So a difference that stays while Envoy counted nothing new is one.
    """
    if found.adds_up:
        return "adds_up"
    if before is not None and found.checks == before.checks:
        return "differs"
    return "settling"


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """As Prometheus's histogram_quantile: linear inside a bucket. `buckets`: upper bound -> count so far.

    None: nothing was observed. Beyond the last finite bound nobody knows; then that bound.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank = q * buckets[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = (low if math.isinf(bound) else bound), count
    return low


def document(
    config: Config,
    facts: Facts,
    history: Sequence[Look],
    points: Sequence[Point],
    now: Look,
    *,
    wall_s: float,
    up_s: float,
) -> dict[str, Any]:
    """The whole, by the keys of FIELDS. `history`: looks of the last POINTS steps, the oldest first;
    `points`: what lies between them.
    """
    then = history[0] if history else Look(now.at_s)
    view = _View(config, facts, history, then, now)
    alerts = sorted(_alerts(view), key=lambda each: -_LEVELS.index(each.level))
    return {
        "schema": SCHEMA,
        "state": _state(facts, alerts),
        "alerts": [
            {"code": each.code, "level": each.level, "subject": each.subject, "text": each.text}
            for each in alerts
        ],
        "now_s": round(wall_s, 3),
        "up_s": round(up_s, 1),
        "loop_age_s": round(now.at_s - facts.at_s, 2),
        "window_s": round(now.at_s - then.at_s, 1),
        "config": {
            "gateway": config.server.url if config.foreign is None else "",
            "deadline_s": config.router.deadline_s,
            "default": config.router.default,
            "policy": {
                "failure_threshold": config.circuit.failure_threshold,
                "window_s": config.circuit.window_s,
                "cooldown_s": config.circuit.cooldown_s,
                "half_open_max_requests": config.circuit.half_open_max_requests,
            },
        },
        "requests": _requests(view),
        "routes": _routes(view),
        "upstreams": _upstreams(view),
        "fallbacks": _fallbacks(view),
        "decisions": _decisions(view),
        "queue": {
            "depth": round(now.sum("pointsman_queue_depth")),
            "limit": config.router.queue,
            "wait_p95_s": view.quantiles("pointsman_queue_seconds", 0.95)[0],
        },
        "workers": _workers(view),
        "audit": _audit(view),
        "history": _history(points, now),
        "last_requests": [describe(record) for record in facts.last],
    }


@dataclass(frozen=True, slots=True)
class _View:
    config: Config
    facts: Facts
    history: Sequence[Look]
    then: Look
    now: Look

    def both(self, name: str, **labels: str) -> dict[str, int]:
        total = self.now.sum(name, **labels)
        return {"recent": round(total - self.then.sum(name, **labels)), "total": round(total)}

    def by(self, name: str, label: str, **labels: str) -> dict[str, dict[str, int]]:
        now = self.now.values(name, label, **labels)
        then = self.then.values(name, label, **labels)
        return {
            key: {"recent": round(total - then.get(key, 0.0)), "total": round(total)}
            for key, total in now.items()
        }

    def quantiles(self, name: str, *quantiles: float, **labels: str) -> list[float | None]:
        buckets = _buckets(name, self.then, self.now, **labels)
        return [_rounded(quantile(buckets, q)) for q in quantiles]

    def ago(self, seconds: float) -> Look:
        """The newest look that is so old, or the oldest there is."""
        for look in reversed(self.history):
            if self.now.at_s - look.at_s >= seconds:
                return look
        return self.then

    def since(self, seconds: float, name: str, **labels: str) -> float:
        return self.now.sum(name, **labels) - self.ago(seconds).sum(name, **labels)


def _buckets(name: str, then: Look, now: Look, **labels: str) -> dict[float, float]:
    before = then.values(f"{name}_bucket", "le", **labels)
    return {
        float(bound): count - before.get(bound, 0.0)
        for bound, count in now.values(f"{name}_bucket", "le", **labels).items()
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


# --- the parts ----------------------------------------------------------------------------------------


def _requests(view: _View) -> dict[str, Any]:
    name = "pointsman_requests_total"
    before = view.ago(RATE_S)
    passed_s = view.now.at_s - before.at_s
    ended = view.now.sum(name) - before.sum(name)
    return {
        "rate": round(ended / passed_s, 2) if passed_s > 0 else 0.0,
        **view.both(name),
        "outcomes": view.by(name, "outcome"),
    }


def _routes(view: _View) -> list[dict[str, Any]]:
    name = "pointsman_decisions_total"
    chains = _chains(view.config)
    asked = view.now.values(name, "route")
    return [
        {
            "route": route,
            "upstreams": list(chains.get(route, ())),
            **view.both(name, route=route),
            "reasons": view.by(name, "reason", route=route),
        }
        for route in dict.fromkeys([*chains, *asked])
    ]


def _chains(config: Config) -> dict[str, tuple[str, ...]]:
    """By route, the names of whom it tries, the rule included."""
    chains = {chain.name: chain for chain in config.chains()}
    return {
        route.name: (
            *(config.upstreams[each].name for each in chain.upstreams),
            *([RULE] if chain.rule else []),
        )
        for route in config.routes
        for chain in [chains[route_chain(route.name)]]
    }


def _upstreams(view: _View) -> list[dict[str, Any]]:
    fallback = view.config.fallback.metric_prefix.removesuffix("_total") + "_total"
    headers = "pointsman_time_to_headers_seconds"
    opened = view.by("pointsman_circuit_transitions_total", "upstream", to=State.OPEN.value)
    none = {"recent": 0, "total": 0}
    found = []
    for each in view.config.upstreams.values():
        own = {"upstream": each.name}
        circuit = view.facts.circuits.get(each.name)
        p50_s, p95_s = view.quantiles(headers, 0.5, 0.95, **own)
        found.append(
            {
                "upstream": each.name,
                "model": each.model,
                "circuit": None
                if circuit is None
                else {
                    "state": circuit.state.value,
                    "half_open_in_s": _left_s(circuit, view),
                    "failures": circuit.failures,
                    "trials": circuit.trials,
                    "opened": opened.get(each.name, none),
                },
                "answered": view.both(f"{headers}_bucket", le="+Inf", **own),
                "went_on": view.both(fallback, **{"from": each.name}),
                "headers_p50_s": p50_s,
                "headers_p95_s": p95_s,
                "tokens": {
                    kind: round(count)
                    for kind, count in view.now.values(
                        "pointsman_tokens_total", "kind", **own
                    ).items()
                },
            }
        )
    return found


def _left_s(circuit: CircuitView, view: _View) -> float | None:
    if circuit.half_open_in_s is None:
        return None
    return round(max(circuit.half_open_in_s - (view.now.at_s - view.facts.at_s), 0.0), 2)


def _fallbacks(view: _View) -> list[dict[str, Any]]:
    name = view.config.fallback.metric_prefix.removesuffix("_total") + "_total"
    before = view.then.samples.get(name, _NONE)
    rows = [
        {
            **dict(labels),
            "recent": round(value - before.get(labels, 0.0)),
            "total": round(value),
        }
        for labels, value in view.now.samples.get(name, _NONE).items()
    ]
    return sorted(rows, key=lambda row: (-row["recent"], -row["total"], row["reason"], row["from"]))


def _decisions(view: _View) -> dict[str, Any]:
    name = "pointsman_decision_seconds"
    percentiles = view.quantiles(name, 0.5, 0.95, 0.99)
    return {
        "count": view.both(f"{name}_bucket", le="+Inf"),
        **dict(zip(("p50_s", "p95_s", "p99_s"), percentiles, strict=True)),
        "degraded": _degraded(view),
    }


def _degraded(view: _View) -> dict[str, int]:
    """By reason, in the last minute; what did not occur is left out."""
    name = "pointsman_decisions_total"
    now, then = (look.values(name, "reason") for look in (view.now, view.ago(ALERT_S)))
    counts = {
        reason.value: round(now.get(reason.value, 0.0) - then.get(reason.value, 0.0))
        for reason in RouteReason
        if reason.value.startswith("degraded_") and reason is not RouteReason.DEGRADED_BODY
    }
    return {reason: count for reason, count in counts.items() if count > 0}


def _workers(view: _View) -> dict[str, Any]:
    crew = view.facts.crew or Crew(0, 0, 0, 0)
    return {
        "seats": crew.seats,
        "busy": crew.busy,
        "idle": crew.idle,
        "starting": crew.starting,
        "restarts": view.by("pointsman_worker_restarts_total", "cause"),
        "embed_p50_s": view.quantiles("pointsman_embed_seconds", 0.5)[0],
        "static_encoder": view.now.sum("pointsman_static_encoder_ready") > 0,
    }


def _audit(view: _View) -> dict[str, Any]:
    facts = view.facts
    read_s = facts.audit_at_s
    told: dict[str, Any] = {"checks": [], "beside": {}}
    if facts.audit is not None:
        told = as_json(facts.audit)
    return {
        "state": facts.audit_state,
        "age_s": None if read_s is None else round(view.now.at_s - read_s, 1),
        "checks": told["checks"],
        "beside": told["beside"],
    }


Point: TypeAlias = "tuple[float, Mapping[str, float | None]]"
"""When it ended, and its value in each column but the first."""


def point(before: Look, look: Look) -> Point:
    """A step of the history."""
    passed_s = look.at_s - before.at_s
    ended, earlier = (x.values("pointsman_requests_total", "outcome") for x in (look, before))
    rate = {key: (count - earlier.get(key, 0.0)) / passed_s for key, count in ended.items()}
    kinds = {
        kind: sum(rate.pop(each.value, 0.0) for each in outcomes)
        for kind, outcomes in _KINDS.items()
    }
    buckets = _buckets("pointsman_decision_seconds", before, look)
    return look.at_s, {
        **{kind: round(value, 2) for kind, value in kinds.items()},
        "other": round(sum(rate.values()), 2),
        **{f"p{q}_s": _rounded(quantile(buckets, q / 100)) for q in (50, 95, 99)},
        "queue": look.sum("pointsman_queue_depth"),
    }


def _history(points: Sequence[Point], now: Look) -> dict[str, list[float | None]]:
    return {
        "ago_s": [round(now.at_s - at_s, 1) for at_s, _ in points],
        **{column: [values[column] for _, values in points] for column in COLUMNS},
    }


# --- what a person should know ------------------------------------------------------------------------


def _state(facts: Facts, alerts: Sequence[Alert]) -> str:
    if any(alert.level == "critical" for alert in alerts):
        return "failing"
    if not facts.ready:
        return "starting"
    return "degraded" if any(alert.level == "warning" for alert in alerts) else "ok"


def _alerts(view: _View) -> Iterable[Alert]:
    silent_s = view.now.at_s - view.facts.at_s
    if silent_s > STUCK_S:
        yield Alert(
            "loop_stuck",
            "critical",
            f"The sidecar's serving loop has been silent for {silent_s:.0f} s. "
            "Envoy sends requests down the default route meanwhile.",
        )
    elif not view.facts.ready:
        waits_for = (
            "the workers load their model"
            if view.config.router.encoder.url is None
            else f"it waits for the embedding service at {view.config.router.encoder.url}"
        )
        yield Alert("starting", "info", f"The sidecar is starting: {waits_for}.")
    yield from _alerts_of_circuits(view)
    yield from _alerts_of_requests(view)
    yield from _alerts_of_router(view)
    yield from _alerts_of_audit(view)


def _alerts_of_circuits(view: _View) -> Iterable[Alert]:
    for name, circuit in view.facts.circuits.items():
        if circuit.state is State.OPEN:
            left_s = _left_s(circuit, view) or 0.0
            yield Alert(
                "circuit_open",
                "warning",
                f"The circuit of {name} is open: requests skip it for {math.ceil(left_s)} s more."
                + _detours(view, name),
                name,
            )
        elif circuit.state is State.HALF_OPEN:
            yield Alert(
                "circuit_half_open",
                "info",
                f"The circuit of {name} is half-open: the next requests try it.",
                name,
            )


def _detours(view: _View, name: str) -> str:
    """Where the routes that begin with an upstream go while its circuit is open."""
    by_next: dict[str, list[str]] = {}
    for route, (first, *others) in _chains(view.config).items():
        if first == name:
            left = (each for each in others if not _is_open(view, each))
            to = next(left, "nobody")
            by_next.setdefault("the rule answer" if to == RULE else to, []).append(route)
    return "".join(
        f" {'Route' if len(routes) == 1 else 'Routes'} {', '.join(routes)}"
        f" {'goes' if len(routes) == 1 else 'go'} to {to}."
        for to, routes in by_next.items()
    )


def _is_open(view: _View, name: str) -> bool:
    circuit = view.facts.circuits.get(name)
    return circuit is not None and circuit.state is State.OPEN


def _alerts_of_requests(view: _View) -> Iterable[Alert]:
    name = "pointsman_requests_total"
    failed = round(view.since(ALERT_S, name, outcome=Outcome.FAILED.value))
    cut = round(view.since(ALERT_S, name, outcome=Outcome.STREAM_CUT.value))
    ruled = round(view.since(ALERT_S, name, outcome=Outcome.SERVED_BY_RULE.value))
    if failed:
        yield Alert("failed", "critical", f"{_count(failed, 'request')} failed in the last minute.")
    if cut:
        yield Alert(
            "stream_cut", "warning", f"{_count(cut, 'answer')} broke off in the last minute."
        )
    if ruled:
        most = ruled > view.since(ALERT_S, name) / 2
        yield Alert(
            "served_by_rule",
            "critical" if most else "warning",
            f"{_count(ruled, 'request')} got the rule answer in the last minute: no model answered.",
            RULE,
        )


def _alerts_of_router(view: _View) -> Iterable[Alert]:
    degraded = _degraded(view)
    if degraded:
        total = round(view.since(ALERT_S, "pointsman_decisions_total"))
        by = ", ".join(f"{reason} {count}" for reason, count in degraded.items())
        yield Alert(
            "degraded_decisions",
            "warning",
            f"{sum(degraded.values())} of {_count(total, 'decision')} in the last minute "
            f"{'was' if sum(degraded.values()) == 1 else 'were'} degraded: {by}.",
        )
    if view.now.sum("pointsman_client_keys_refused"):
        yield Alert(
            "client_keys_refused",
            "warning",
            "The file of clients' keys has a fault: the keys from before are in force. "
            "The sidecar's log says which.",
        )
    broken = round(view.since(ALERT_S, "pointsman_internal_errors_total"))
    if broken:
        yield Alert(
            "internal_errors",
            "critical",
            f"{_count(broken, 'request')} passed on undecided in the last minute, "
            "because of a fault in the sidecar: its log says which.",
        )
    depth, limit = view.now.sum("pointsman_queue_depth"), view.config.router.queue
    if depth >= _NEARLY_FULL * limit:
        yield Alert(
            "queue_nearly_full", "warning", f"{depth:.0f} of {limit} places in the queue are taken."
        )
    if view.facts.encoder:
        yield Alert(
            "encoder_away",
            "warning",
            f"No prompt is sent to the embedding service: {view.facts.encoder}. "
            "Until it answers, the static encoder decides, or else the default route.",
        )
    crew = view.facts.crew
    if view.facts.ready and crew is not None and crew.busy + crew.idle < crew.seats:
        missing = crew.seats - crew.busy - crew.idle
        yield Alert(
            "workers_missing",
            "warning",
            f"{missing} of {_count(crew.seats, 'worker')} being replaced.",
        )


def _alerts_of_audit(view: _View) -> Iterable[Alert]:
    facts = view.facts
    if facts.audit_state == "differs" and facts.audit is not None:
        names = ", ".join(check.what for check in facts.audit.checks if check.difference)
        yield Alert("audit_differs", "critical", f"The account does not add up: {names}.")
    elif facts.ready and facts.audit_state == "unknown":
        yield Alert(
            "envoy_unreadable",
            "warning",
            "Envoy's admin interface does not answer, so nothing can be compared with its counters.",
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
