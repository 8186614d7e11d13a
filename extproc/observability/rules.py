"""Prometheus' rules: what is worth an alert, why, and how it is asked; no limit of an operator's is in here.

A limit that an operator sets is a metric of the sidecar, so the rules are the same for every install.
Nor do they name a job: what has a metric of ours is a gateway of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import yaml

from extproc.core.errors import Outcome, RouteReason
from extproc.core.ledger import UnseenCause

RUNBOOKS: Final = "docs/runbooks"

GATEWAY: Final = "cluster, namespace, job"
"""Labels that one gateway's pods share, wherever it runs; what a scrape does not have stays empty."""
POD: Final = f"{GATEWAY}, pod, instance"

_REQUESTS: Final = "gateway:pointsman_requests:increase5m"
_OWED: Final = "gateway:pointsman_requests_owed:increase5m"
_LEAST: Final = 20
"""Requests in 5 minutes under which a share says nothing: one of them would be 5 %."""


class Severity(StrEnum):
    CRITICAL = "critical"
    """Clients get errors or no real answers: wake someone."""
    WARNING = "warning"
    """Clients are served, by something that should not have to: today, not tonight."""


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    severity: Severity
    when: str
    """In words, for the index."""
    expr: str
    hold: str
    """How long it must be true; empty: once is enough."""
    summary: str
    description: str
    needs_envoy: bool = False
    """Asks for Envoy's own metrics, and is silent where nobody scrapes them."""


def _any_of(*values: StrEnum) -> str:
    return "|".join(value.value for value in values)


def _share(*outcomes: Outcome, over: str) -> str:
    """The share of these outcomes in what clients were owed an answer for."""
    return (
        f'sum by ({GATEWAY}) ({_REQUESTS}{{outcome=~"{_any_of(*outcomes)}"}})\n'
        f"  / on ({GATEWAY}) {_OWED} > {over}\n"
        f"and on ({GATEWAY}) {_OWED} >= {_LEAST}"
    )


_NOT_OWED: Final = _any_of(Outcome.REJECTED, Outcome.CLIENT_GONE)
RECORDS: Final = (
    Record(_REQUESTS, f"sum by ({GATEWAY}, outcome) (increase(pointsman_requests_total[5m]))"),
    # A refusal is the client's own fault, and one that left waits for nothing.
    Record(
        _OWED,
        f'sum by ({GATEWAY}) ({_REQUESTS}{{outcome!~"{_NOT_OWED}"}})\n'
        f"+ sum by ({GATEWAY}) (increase(pointsman_requests_unseen_total[5m]))",
    ),
)

_OF: Final = "{{ $labels.job }}"
_AT: Final = "{{ $labels.instance }} of " + _OF
_SHARE: Final = "{{ $value | humanizePercentage }}"
_COUNT: Final = '{{ $value | printf "%.0f" }}'

_DEGRADED: Final = _any_of(
    RouteReason.DEGRADED_FAST,
    RouteReason.DEGRADED_DEADLINE,
    RouteReason.DEGRADED_QUEUE_FULL,
    RouteReason.DEGRADED_WORKER,
)
_BYPASSED: Final = RouteReason.DEGRADED_BYPASSED.value
_INGRESS: Final = '{envoy_http_conn_manager_prefix="ingress"}'

ALERTS: Final[Sequence[Alert]] = (
    # --- what clients notice --------------------------------------------------------------------------
    Alert(
        "PointsmanRequestsFailing",
        Severity.CRITICAL,
        "over 1 % of requests end in a 5xx or a 429",
        _share(Outcome.FAILED, over="0.01"),
        "2m",
        f"{_OF}: {_SHARE} of requests fail",
        f"Over the last 5 minutes {_SHARE} of the requests got an error of ours or a provider's "
        "last one (5xx, 429). The limit is 1 %.",
    ),
    Alert(
        "PointsmanRuleAnswers",
        Severity.CRITICAL,
        "over 1 % of requests get the rule answer instead of a model's",
        _share(Outcome.SERVED_BY_RULE, over="0.01"),
        "2m",
        f"{_OF}: {_SHARE} of requests get the rule answer",
        f"Over the last 5 minutes no model of the route answered {_SHARE} of the requests; their "
        "clients got the canned text, as a 200. The limit is 1 %.",
    ),
    Alert(
        "PointsmanStreamsCut",
        Severity.WARNING,
        "over 5 % of answers break off on their way",
        _share(Outcome.STREAM_CUT, over="0.05"),
        "5m",
        f"{_OF}: {_SHARE} of answers break off",
        f"Over the last 5 minutes {_SHARE} of the answers began and did not end: the upstream "
        "closed the stream, or was silent for [server] write_timeout. The limit is 5 %.",
    ),
    Alert(
        "PointsmanFallbackShareHigh",
        Severity.WARNING,
        "over 5 % of requests are answered by another than the first upstream, for 5 minutes",
        _share(Outcome.SERVED_BY_FALLBACK, Outcome.SERVED_BY_RULE, over="0.05"),
        "5m",
        f"{_OF}: {_SHARE} of requests fall back",
        f"Over the last 5 minutes {_SHARE} of the requests were answered by another upstream than "
        "their route's first, or by the rule. The limit is 5 %.",
    ),
    # --- upstreams ------------------------------------------------------------------------------------
    Alert(
        "PointsmanCircuitOpen",
        Severity.WARNING,
        "an upstream's circuit is open, or opens again and again, for 3 minutes",
        # Each cooldown ends in half-open for a moment, which must not end the alert.
        f"sum by ({GATEWAY}, upstream) (max_over_time(pointsman_circuit_state[2m]) == bool 2) > 0",
        "3m",
        f"{_OF}: the circuit of {{{{ $labels.upstream }}}} is open",
        f"{_COUNT} pod(s) skip the upstream {{{{ $labels.upstream }}}}: it failed too often, and "
        "has not answered a trial since.",
    ),
    Alert(
        "PointsmanRetryBudgetSpent",
        Severity.WARNING,
        "an upstream fails so often that over 10 retries in 5 minutes were not made",
        f"sum by ({GATEWAY}, pointsman_upstream) (\n"
        '  increase(envoy_cluster_upstream_rq_retry_overflow{envoy_cluster_name="hosts"}[5m])\n'
        ") > 10",
        "5m",
        f"{_OF}: the retry budget of {{{{ $labels.pointsman_upstream }}}} is spent",
        f"In 5 minutes {_COUNT} retries on the upstream {{{{ $labels.pointsman_upstream }}}} were "
        "not made, because a fifth of what is in flight there are retries already.",
        needs_envoy=True,
    ),
    # --- decisions ------------------------------------------------------------------------------------
    Alert(
        "PointsmanDecisionsDegraded",
        Severity.WARNING,
        "over 5 % of decisions are made without the embedding model, for 10 minutes",
        f"sum by ({GATEWAY}) "
        f'(increase(pointsman_decisions_total{{reason=~"{_DEGRADED}"}}[5m]))\n'
        f"  / sum by ({GATEWAY}) (increase(pointsman_decisions_total[5m])) > 0.05\n"
        f"and on ({GATEWAY}) {_OWED} >= {_LEAST}",
        "10m",
        f"{_OF}: {_SHARE} of decisions are degraded",
        f"Over the last 5 minutes the embedding model could not answer in time for {_SHARE} of the "
        "requests: the static encoder or the default route decided. The limit is 5 %.",
    ),
    Alert(
        "PointsmanDecisionsSlow",
        Severity.WARNING,
        "the p95 of decisions is over four fifths of `[router] deadline`, for 10 minutes",
        "histogram_quantile(0.95,\n"
        f"  sum by ({GATEWAY}, le) (rate(pointsman_decision_seconds_bucket[5m]))\n"
        f") > on ({GATEWAY}) 0.8 * max by ({GATEWAY}) (pointsman_decision_deadline_seconds)\n"
        f"and on ({GATEWAY}) {_OWED} >= {_LEAST}",
        "10m",
        f"{_OF}: decisions take {{{{ $value | humanizeDuration }}}}",
        "The p95 of decisions over the last 5 minutes is {{ $value | humanizeDuration }}, over "
        "four fifths of [router] deadline: soon they will be degraded.",
    ),
    Alert(
        "PointsmanQueueNearlyFull",
        Severity.WARNING,
        "on average over 80 % of `[router] queue` are waiting, for 2 minutes",
        f"max by ({POD}) (\n"
        "  avg_over_time(pointsman_queue_depth[2m]) / pointsman_queue_limit\n"
        ") > 0.8",
        "1m",
        f"{_AT}: the queue is {_SHARE} full",
        f"On average over 2 minutes, {_SHARE} of [router] queue were waiting for a worker. Beyond "
        "it prompts are not embedded at all.",
    ),
    Alert(
        "PointsmanWorkersRestarting",
        Severity.WARNING,
        "over 2 workers of a pod were replaced in 15 minutes",
        f"sum by ({POD}) (increase(pointsman_worker_restarts_total[15m])) > 2",
        "",
        f"{_AT}: {_COUNT} workers replaced in 15 minutes",
        f"{_COUNT} embedding workers ended or were killed in 15 minutes, each with the prompt that "
        "it was at.",
    ),
    # --- the sidecar ----------------------------------------------------------------------------------
    Alert(
        "PointsmanSidecarAbsent",
        Severity.CRITICAL,
        "no sidecar at all has been scraped for 5 minutes",
        "absent(pointsman_requests_total)",
        "5m",
        "No Pointsman sidecar is scraped",
        "Prometheus has had no metric of any sidecar for 5 minutes: all are down, or it does not "
        "find or reach them. Every other alert here is blind.",
    ),
    Alert(
        "PointsmanSidecarDown",
        Severity.WARNING,
        "a sidecar that was scraped within the last hour has not answered for 2 minutes",
        f"max by ({POD}) (up) == 0\n"
        f"and on ({GATEWAY}, instance) max_over_time(pointsman_queue_limit[1h])",
        "2m",
        f"{_AT}: the sidecar does not answer",
        f"The sidecar at {_AT} has not answered a scrape for 2 minutes (up is {_COUNT}). Its Envoy "
        "sends every request down the default route.",
    ),
    Alert(
        "PointsmanSidecarRestarting",
        Severity.WARNING,
        "a sidecar started over 2 times anew in 15 minutes",
        f"max by ({POD}) (\n"
        "  changes(process_start_time_seconds[15m])\n"
        f"  and on ({GATEWAY}, instance) max_over_time(pointsman_queue_limit[15m])\n"
        ") > 2",
        "",
        f"{_AT}: the sidecar started {_COUNT} times in 15 minutes",
        f"The sidecar at {_AT} was replaced {_COUNT} times in 15 minutes. Each time, requests "
        "pass it by until it is warm.",
    ),
    Alert(
        "PointsmanSidecarBypassed",
        Severity.CRITICAL,
        "over 5 % of requests passed the sidecar by, undecided",
        "(\n"
        f"  sum by ({GATEWAY}) "
        f'(increase(pointsman_decisions_total{{reason="{_BYPASSED}"}}[5m]))\n'
        f"  + sum by ({GATEWAY}) (increase("
        f'pointsman_requests_unseen_total{{cause="{UnseenCause.BYPASSED.value}"}}[5m]))\n'
        f") / on ({GATEWAY}) {_OWED} > 0.05 and on ({GATEWAY}) {_OWED} >= {_LEAST}\n"
        "or\n"
        # A dead sidecar tells nothing; then only Envoy knows.
        f"sum by ({GATEWAY}) (increase(envoy_http_ext_proc_failure_mode_allowed{_INGRESS}[5m]))\n"
        f"  / sum by ({GATEWAY}) (increase(envoy_http_downstream_rq_total{_INGRESS}[5m])) > 0.05\n"
        f"and sum by ({GATEWAY}) (increase(envoy_http_downstream_rq_total{_INGRESS}[5m])) "
        f">= {_LEAST}",
        "2m",
        f"{_OF}: {_SHARE} of requests pass the sidecar by",
        f"Over the last 5 minutes the sidecar did not answer Envoy in time, or at all, for {_SHARE} "
        "of the requests: they took the default route, undecided. The limit is 5 %.",
    ),
    Alert(
        "PointsmanInternalErrors",
        Severity.WARNING,
        "the sidecar passed on a request undecided because of a fault of its own",
        f"sum by ({GATEWAY}) (increase(pointsman_internal_errors_total[10m])) > 0",
        "",
        f"{_OF}: {_COUNT} internal error(s) of the sidecar",
        f"In 10 minutes the sidecar failed at {_COUNT} request(s) by a fault of its own, and passed "
        "them on undecided.",
    ),
    # --- the account ----------------------------------------------------------------------------------
    Alert(
        "PointsmanRequestLost",
        Severity.WARNING,
        "Envoy ended a request that no record told of, and that was not merely bypassed",
        f"sum by ({GATEWAY}) (\n"
        f'  increase(pointsman_requests_unseen_total{{cause="{UnseenCause.RECORD_LOST.value}"}}'
        "[10m])\n"
        ") > 0",
        "",
        f"{_OF}: the outcome of {_COUNT} request(s) is unknown",
        f"In 10 minutes {_COUNT} request(s) ended in Envoy and no record of them reached the "
        "sidecar: nobody knows their outcome.",
    ),
    Alert(
        "PointsmanEnvoyUnreadable",
        Severity.CRITICAL,
        "a sidecar that could read its Envoy's counters no longer can",
        f'sum by ({POD}) (increase(pointsman_envoy_reads_total{{result="failed"}}[2m])) > 0\n'
        f"and on ({POD}) "
        f'sum by ({POD}) (increase(pointsman_envoy_reads_total{{result="ok"}}[2m])) == 0\n'
        # Where it never could, as beside an Envoy of somebody else's, this is no news.
        f'and on ({POD}) sum by ({POD}) (pointsman_envoy_reads_total{{result="ok"}}) > 0',
        "2m",
        f"{_AT}: Envoy does not answer its sidecar",
        f"The sidecar at {_AT} tried {_COUNT} times in 2 minutes to read the counters of its "
        "Envoy, and got no answer. If Envoy is down, nothing is served there.",
    ),
    Alert(
        "PointsmanClientKeysRefused",
        Severity.WARNING,
        "a changed file of clients' keys was refused, and the keys from before are in force",
        f"max by ({POD}) (pointsman_client_keys_refused) > 0",
        "1m",
        f"{_AT}: the changed file of clients' keys was refused",
        f"The sidecar at {_AT} refused the changed [server.auth] keys_file. "
        "A new key does not open the gateway yet, and one that was taken out still does.",
    ),
)


def document() -> str:
    """The rule file, as Prometheus loads it."""
    rules: list[dict[str, object]] = [{"record": each.name, "expr": each.expr} for each in RECORDS]
    rules += [_alert(each) for each in ALERTS]
    text = yaml.dump(
        {"groups": [{"name": "pointsman", "rules": rules}]},
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=1000,
    )
    return f"# Made by `make observability` from extproc/observability/rules.py; edit that.\n{text}"


def _alert(alert: Alert) -> dict[str, object]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        **({"for": alert.hold} if alert.hold else {}),
        "labels": {"severity": alert.severity.value},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{RUNBOOKS}/{alert.name}.md",
        },
    }


_INDEX: Final = """\
# Runbooks

Made by `make observability` from `extproc/observability/rules.py`; edit that, not this file. The pages beside it are written by hand.

One page for each alert of [rules.yaml](../../helm/pointsman/files/rules.yaml). `critical`: clients get errors, or no model's answer; wake someone. `warning`: clients are served, by something that should not have to; today, not tonight. Several at once usually have one cause: begin with the topmost.

The commands take the default ports: 8080 the gateway, 9464 the sidecar, 9901 Envoy's admin interface. `pointsman tail` and `pointsman audit` need `--config FILE` where yours are others. On Kubernetes both are on the pod's loopback; bring them to your machine, or run the command in the pod:

```
kubectl -n NAMESPACE port-forward POD 9464 9901
kubectl -n NAMESPACE exec POD -c pointsman -- pointsman tail --config /etc/pointsman/pointsman.toml
kubectl -n NAMESPACE logs POD -c pointsman     # the sidecar; -c envoy: Envoy
```

{table}
"""


def index() -> str:
    """docs/runbooks/README.md."""
    rows = [
        f"| [{alert.name}]({alert.name}.md) | {alert.severity.value} | {alert.when}"
        f"{' (needs the scrape of Envoy)' if alert.needs_envoy else ''} |"
        for alert in ALERTS
    ]
    head = ["| Alert | Severity | Fires when |", "|---|---|---|"]
    return _INDEX.format(table="\n".join(head + rows))


class _Dumper(yaml.SafeDumper):
    """Long expressions as literal blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
