"""docs/observability.md out of the code that it tells of; what else there is to see, it only links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from prometheus_client import CollectorRegistry, Histogram

from extproc.app import logs, status
from extproc.config import Fallback
from extproc.core.circuit import State
from extproc.core.errors import FallbackReason, Outcome, RouteReason
from extproc.core.ledger import UnseenCause
from extproc.embedding.pool import RestartCause, SkipCause
from extproc.embedding.service import Fault
from extproc.envoyconf import access_log, stats, tracing
from extproc.metrics import Metrics, RecordKind
from extproc.serving import decided, events, page

_SPANS: Final = (
    (
        tracing.SERVICE,
        tracing.REQUEST_SPAN,
        "the client's, from `traceparent`",
        "the whole exchange",
    ),
    (
        tracing.SERVICE,
        f"{tracing.ATTEMPT_SPAN} UPSTREAM",
        f"`{tracing.REQUEST_SPAN}`",
        "one visit to an upstream, tries on the same one included",
    ),
    (
        tracing.SERVICE,
        "async ...ExternalProcessor.Process egress",
        f"`{tracing.REQUEST_SPAN}`",
        "Envoy's call to the sidecar; `canceled` is how such a call ends well",
    ),
    (decided.SERVICE, decided.DECISION, "Envoy's call", "from the body's arrival to the reply"),
    (
        decided.SERVICE,
        decided.QUEUE,
        f"`{decided.DECISION}`",
        "waiting for a worker, or for a call to the embedding service",
    ),
    (
        decided.SERVICE,
        decided.EMBED,
        f"`{decided.DECISION}`",
        "tokenising and running the model, in the worker; with an embedding service, the call",
    ),
    (decided.SERVICE, decided.SCORE, f"`{decided.DECISION}`", "comparing with the routes"),
)

_ATTRIBUTES: Final = {
    f"`{tracing.REQUEST_SPAN}`": (*tracing.REQUEST_TAGS, "guid:x-request-id"),
    f"`{tracing.ATTEMPT_SPAN} UPSTREAM`": (*tracing.ATTEMPT_TAGS, "pointsman.upstream"),
    "`decision`": (
        "pointsman.route",
        "pointsman.reason",
        "pointsman.code",
        "pointsman.score.ROUTE",
    ),
}

_LABELS: Final[Sequence[tuple[str, str, Iterable[str] | str]]] = (
    ("outcome", "`pointsman_requests_total`", Outcome),
    ("cause", "`pointsman_requests_unseen_total`", UnseenCause),
    ("reason", "`pointsman_decisions_total`", RouteReason),
    ("reason", "`{fallback}`", FallbackReason),
    ("cause", "`pointsman_queue_skipped_total`", SkipCause),
    ("cause", "`pointsman_worker_restarts_total`", RestartCause),
    ("cause", "`pointsman_embedding_failures_total`", Fault),
    ("kind", "`pointsman_records_total`", RecordKind),
    ("kind", "`pointsman_tokens_total`", ("prompt", "completion")),
    ("usage", "`pointsman_answers_total`", ("reported", "absent")),
    ("of", "`pointsman_account_offset`", ("requests", "bypassed", "records")),
    (
        "result",
        "`pointsman_envoy_reads_total`, `pointsman_client_key_reloads_total`",
        ("ok", "failed"),
    ),
    ("result", "`pointsman_decision_cache_total`", ("hit", "miss")),
    ("encoder", "`pointsman_cascade_total`", ("static", "full")),
    ("to", "`pointsman_circuit_transitions_total`", State),
    ("code", "`pointsman_rejections_total`", "the error codes of the README"),
    ("route", "everywhere", "the configured routes, and `explicit`"),
    ("upstream", "everywhere", "the names of the configured upstreams, and `rule`"),
    ("from, to", "`{fallback}`", "the same"),
)

_TEXT: Final = """\
# Observability

Made by `make observability` from the code; edit `extproc/observability/page.py`, not this file.

| Look at | for |
|---|---|
| `GET /metrics` on `[metrics] listen` | the sidecar's metrics, below |
| `GET /stats/prometheus` on `[metrics] envoy_listen`, and on `[admin] listen` | Envoy's own |
| [runbooks](runbooks/README.md) | what to do about an alert |
| [rules.yaml](../helm/pointsman/files/rules.yaml), [dashboard.json](../helm/pointsman/files/dashboard.json) | alerts for Prometheus, a dashboard for Grafana |
| `GET /` on `[metrics] listen` | the status page, below; `GET /status.json` is the same for scripts |
| `pointsman audit` | whether every request is accounted for |
| `pointsman tail` | requests as they end |
| `[log] access` | a JSON line for each request, by Envoy |
| `[log] format`, `level` | the sidecar's own log, on stderr |
| `[tracing] endpoint` | spans of Envoy and the sidecar, in one trace |

The same `x-request-id` is in the response, the access log, the trace, `tail`, and the sidecar's log.

## Metrics

No label takes a value from a client. With U upstreams and R routes there are at most {reasons} U² + {route_reasons} R + U (2 R + 60) + 150 series, those of the process (`process_*`) left out.

{metrics}

Label values:

{labels}

What the times can tell, and what not:

- All come from Envoy's records, one for each attempt, at its end. A stream still running is in none of them.
- `pointsman_time_to_first_token_seconds` ends with the first byte of the body. What the provider puts there, a comment or an empty delta, counts.
- `pointsman_token_gap_seconds` is a mean for each stream: last byte less first, by the completion tokens that the provider reported. A stall amid a fast stream hides in it, and a stream without usage is not in it: ask for `stream_options: {{"include_usage": true}}`.
- Attempts of a client that left count no tokens, because usage comes last.
- Tokens are what the provider says. They are read from event streams as these pass (an event over 64 KiB is not read), from completions, which are read for their schema anyway, and from other JSON answers that say they have at most 1 MiB. Nothing is held back for it. The filter for event streams, `sse_to_metadata`, is work in progress in Envoy 1.40, and Envoy says so at its start.

### Envoy's own

Everything else that Envoy counts is at its `/stats/prometheus`. `[metrics] envoy_listen` opens that one path to Prometheus, from Envoy itself, so that it answers while the sidecar is down; the rest of the admin interface, which can end Envoy, stays where it is. Beside Envoy's own labels, metrics of an upstream have `{upstream_label}`, its id, and those of a chain `{chain_label}`. With 3 upstreams it is 4,200 series, 450 kB a scrape; `?filter=REGEX` asks for those whose names (as `/stats` writes them) match, and 1,100 are enough for alerts and dashboard: `podMonitor.envoyFilter` in [values.yaml](../helm/pointsman/values.yaml).

## Alerts and dashboard

[rules.yaml](../helm/pointsman/files/rules.yaml) is a rule file for Prometheus, [dashboard.json](../helm/pointsman/files/dashboard.json) a dashboard to import into Grafana (11.6 or newer). Both know no name of an install: they ask for metrics, by job, and the limits of the configuration are metrics too. So one copy serves all gateways that a Prometheus scrapes. The chart installs them with `metrics.rules.enabled` and `metrics.dashboard.enabled`.

```yaml
rule_files: [rules.yaml]
scrape_configs:
  - job_name: pointsman
    static_configs: [{{targets: ["127.0.0.1:9464"]}}]      # [metrics] listen
  - job_name: pointsman-envoy                            # optional
    metrics_path: /stats/prometheus
    params: {{filter: ['^(cluster\\.(hosts|extproc)|http\\.ingress|access_logs|server)\\.']}}
    static_configs: [{{targets: ["127.0.0.1:9466"]}}]      # [metrics] envoy_listen
```

- Every alert has a page in [runbooks](runbooks/README.md). Its `runbook_url` holds the page's path in this repository; put your own base before it (in the chart: `metrics.rules.runbookBase`).
- Shares are of the requests that were owed an answer: without `rejected` and `client_gone`. With fewer than 20 of those in 5 minutes they say nothing.
- Without the scrape of Envoy two things stay unknown: `PointsmanRetryBudgetSpent`, and `PointsmanSidecarBypassed` while the sidecar is dead (then `PointsmanSidecarDown` fires, and the bypassed requests are counted once it is back). In the dashboard the panel `Envoy's total less ours` and the row `Envoy` stay empty.
- The name of the fallback metric is `[fallback] metric_prefix`, and in the dashboard the variable `Fallback metric`. No alert uses it.
- `PointsmanDecisionsSlow` cannot fire with a `[router] deadline` over 6 s: the longest time that is told apart is 5 s.

## The account

Each request that reaches the listener ends in exactly one outcome. Envoy tells of it in a record; `pointsman audit` compares what arrived with what Envoy counted:

| Envoy | is the sidecar's |
|---|---|
| `http.ingress.downstream_rq_total` less `downstream_rq_active` | `pointsman_requests_total` + `pointsman_requests_unseen_total` + `pointsman_account_offset{{of="requests"}}` |
| `http.ingress.ext_proc.failure_mode_allowed` | `pointsman_decisions_total{{reason="degraded_bypassed"}}` - `pointsman_internal_errors_total` + `pointsman_requests_unseen_total{{cause="bypassed"}}` + `pointsman_account_offset{{of="bypassed"}}` |
| `access_logs.grpc_access_log.logs_written` | `pointsman_records_total` + `pointsman_records_lost_total` + `pointsman_account_offset{{of="records"}}` |

- Envoy counts a record as written even when nobody was there to take it. So the sidecar reads Envoy's totals every 2 s: what was due at one reading and has not come by the next is lost. Under traffic that is a lower bound; a quiet second makes it exact.
- A killed sidecar's successor finds in `SOCKET.ledger`, beside the socket, what had been counted before: the offset. It is negative when Envoy was replaced under a living sidecar.
- What an Envoy that was killed had in flight, nobody knows.

## Access log

One JSON line for each request in `[log] access`; keys in alphabetical order, `null` where there is nothing. No header of the client but its request id, no query, no body.

{access}

A request that Envoy refused before its filters saw it (no HTTP, no host) has no `route`, `reason`, `stream`, `attempts`, `fallback`. There is no outcome: it follows from `status`, `flags`, `upstream` and `fallback`, and `tail` shows it. Envoy keeps lines for up to 10 s before it writes them (its flag `--file-flush-interval-msec`; under `pointsman up` 1 s); send it SIGUSR1 after rotating the file.

## The sidecar's log

{log}

From one place in the code come at most {burst} lines in {window:g} s; the next one after it says how many were left out.

## `GET /events`

What `pointsman tail` reads, on `[metrics] listen`: server-sent events, one JSON object for each request as it ends. {watchers} watchers at most. For a slow one {backlog} events wait; beyond that they are dropped, and an event `dropped` says how many.

{events}

## The status page

`GET /` on `[metrics] listen`; `pointsman up` prints its address. One file, without anything from elsewhere. It asks for `/status.json` each second and shows it: one document is one moment, a lost connection is simply an answer that does not come, and a browser's few connections to a host stay free, which a stream for each tab would take. A document costs the sidecar about 1.4 ms of processor time with 3 upstreams and 3 routes, 17 ms with 20 and 20, once each half second however many look, and nothing while nobody does. The history behind it costs 0.5 ms every {step:g} s (2 ms with 20 and 20) and 1 to 4 MB.

The playground sends the prompt to `POST /route` there: the decision of the gateway's own `POST /route`, on the same loop, with the same deadline and the same workers, but without the decision cache. Beside it `timings` in milliseconds, and where a rule decided, `scores_unasked`: what meaning would have said. A prompt of at most {most} KiB; it is logged nowhere and kept nowhere. It is no request, so it is in no outcome and no decision of the metrics; `pointsman_embed_seconds`, `pointsman_queue_seconds` and `pointsman_cascade_total` count the work.

There is no log-in and nothing to press: who reaches the port can look, and try prompts. On loopback that is whoever is on the machine. So that no web page can make a browser there do it, what comes from another origin is refused (403), a prompt must be `application/json` (415), and the name in the URL must be an IP address, `localhost`, a name without a dot, or one under `.localhost`, `.internal` or `.svc` (421): nobody outside can point such a name at this address. `/metrics` and the probes answer to any name.

`GET /status.json`:

{status}

## Traces

W3C `traceparent` in, the same trace on to the upstream. OTLP over gRPC, from Envoy and from the sidecar. A caller's decision to sample is kept; traces that begin here are sampled by `[tracing] sampling`. A receiver that is away costs spans, never a request.

{spans}

Attributes of ours, beside Envoy's usual ones; `http.url` is cut behind the host, because a query may hold a key:

{attributes}
"""


def document() -> str:
    """The whole of docs/observability.md."""
    return _TEXT.format(
        upstream_label=stats.UPSTREAM_LABEL,
        chain_label=stats.CHAIN_LABEL,
        reasons=len(FallbackReason),
        route_reasons=len(RouteReason),
        metrics=_table(("Metric", "Type", "Labels", "Says"), _metrics()),
        labels=_table(("Label", "Of", "Values"), _label_values()),
        access=_fields({name: field.meaning for name, field in access_log.FIELDS.items()}),
        log=_fields(logs.FIELDS),
        events=_fields(events.FIELDS),
        status=_fields(status.FIELDS),
        step=status.STEP_S,
        most=page.MOST_BYTES // 1024,
        burst=logs.BURST,
        window=logs.WINDOW_S,
        watchers=events.MOST_WATCHERS,
        backlog=events.BACKLOG,
        spans=_table(
            ("Service", "Span", "Parent", "Lasts"),
            ((f"`{service}`", f"`{name}`", parent, what) for service, name, parent, what in _SPANS),
        ),
        attributes=_table(
            ("Span", "Attributes"),
            ((span, ", ".join(f"`{tag}`" for tag in tags)) for span, tags in _ATTRIBUTES.items()),
        ),
    )


def _metrics() -> Iterable[tuple[str, ...]]:
    registry = CollectorRegistry()
    Metrics(registry, fallback_metric=Fallback().metric_prefix, routes=[], upstream_names=[])
    collectors: dict[int, Any] = {id(each): each for each in registry._names_to_collectors.values()}  # noqa: SLF001
    for collector in collectors.values():
        metric = next(iter(collector.describe()))
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)  # noqa: SLF001
        says = metric.documentation
        if isinstance(collector, Histogram):
            bounds = collector._kwargs["buckets"]  # noqa: SLF001
            says += f" Buckets: {', '.join(f'{bound:g}' for bound in bounds)} s."
        yield f"`{name}`", metric.type, labels, says


def _label_values() -> Iterable[tuple[str, ...]]:
    for label, of, values in _LABELS:
        told = (
            values if isinstance(values, str) else ", ".join(f"`{each}`" for each in _plain(values))
        )
        yield f"`{label}`", of.format(fallback=Fallback().metric_prefix), told


def _plain(values: Iterable[str]) -> list[str]:
    return [value.value if isinstance(value, StrEnum) else value for value in values]


def _fields(fields: Mapping[str, str]) -> str:
    return _table(("Key", "Holds"), ((f"`{name}`", says) for name, says in fields.items()))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
