"""Each alert fires on what it is for, says the values, and stays quiet otherwise: promtool is the judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from prometheus_tools import promtool

from extproc.observability import page, rules

# Every series is of one pod of each gateway, read every 15 s: `0+3x40` rises by 12 a minute, for 10.
JOBS = ("gw", "other")
"""Two gateways that fare alike: what is asked of one must not be answered by both."""
GATEWAY = {"namespace": "llm", "job": "gw"}
POD = {**GATEWAY, "pod": "gw-1", "instance": "10.0.0.1:9464"}
Series = Mapping[str, str]


def requests(**rises: float) -> Series:
    return {
        "pointsman_requests_unseen_total{cause='bypassed'}": "0x80",
        **{
            f"pointsman_requests_total{{outcome='{outcome}'}}": f"0+{rise}x80"
            for outcome, rise in rises.items()
        },
    }


def decisions(**rises: float) -> Series:
    return {
        f"pointsman_decisions_total{{route='chat',reason='{reason}'}}": f"0+{rise}x80"
        for reason, rise in rises.items()
    }


def decided_within(*, fast: float, slow: float, deadline_s: float = 0.15) -> Series:
    """Decisions a reading: so many take under 50 ms, so many 150 to 200 ms."""
    rises = {"0.05": fast, "0.15": fast, "0.2": fast + slow, "+Inf": fast + slow}
    return {
        "pointsman_decision_deadline_seconds": f"{deadline_s}x80",
        **{
            f"pointsman_decision_seconds_bucket{{le='{le}'}}": f"0+{rise}x80"
            for le, rise in rises.items()
        },
    }


def budget(rise: float, *, cluster: str = "hosts") -> Series:
    labels = f"envoy_cluster_name='{cluster}',pointsman_upstream='a'"
    return {f"envoy_cluster_upstream_rq_retry_overflow{{{labels}}}": f"0+{rise}x80"}


def envoy(*, passed: float, total: float) -> Series:
    label = "envoy_http_conn_manager_prefix='ingress'"
    return {
        f"envoy_http_ext_proc_failure_mode_allowed{{{label}}}": f"0+{passed}x80",
        f"envoy_http_downstream_rq_total{{{label}}}": f"0+{total}x80",
    }


def reads(ok: str, failed: str) -> Series:
    return {
        "pointsman_envoy_reads_total{result='ok'}": ok,
        "pointsman_envoy_reads_total{result='failed'}": failed,
    }


@dataclass(frozen=True)
class Case:
    fires: tuple[Series, ...]
    value: str
    """How the annotations must write it."""
    quiet: tuple[Series, ...]
    labels: Mapping[str, str] = field(default_factory=lambda: GATEWAY)


CASES: Mapping[str, Case] = {
    "PointsmanRequestsFailing": Case(
        fires=(requests(served=9, failed=1), requests(served_by_fallback=9, failed=1)),
        value="10%",
        quiet=(
            requests(served=199, failed=1),
            requests(served=9, rejected=9, failed=0),
            requests(served=0.5, failed=0.1),  # 2 of 12 in five minutes
        ),
    ),
    "PointsmanRuleAnswers": Case(
        fires=(requests(served=9, served_by_rule=1),),
        value="10%",
        quiet=(requests(served=9, served_by_fallback=9, served_by_rule=0.1),),
    ),
    "PointsmanStreamsCut": Case(
        fires=(requests(served=8, stream_cut=2),),
        value="20%",
        quiet=(requests(served=97, stream_cut=3), requests(served=9, client_gone=9, stream_cut=0)),
    ),
    "PointsmanFallbackShareHigh": Case(
        fires=(
            requests(served=9, served_by_fallback=0.5, served_by_rule=0.5),
            # What is the client's own is no part of the whole.
            requests(served=9, served_by_fallback=1, rejected=90, client_gone=90),
        ),
        value="10%",
        quiet=(
            requests(served=96, served_by_fallback=4),
            requests(served=0.5, served_by_fallback=0.1),
        ),
    ),
    "PointsmanCircuitOpen": Case(
        fires=(
            {"pointsman_circuit_state{upstream='a'}": "0x10 2x70"},
            # Each trial fails: half-open for a moment.
            {"pointsman_circuit_state{upstream='a'}": "0 0 2 2 1 2 2 2 1" + " 2 1" * 40},
        ),
        value="1",
        quiet=(
            {"pointsman_circuit_state{upstream='a'}": "0x60 2 2 1 0x20"},
            # Nobody asks for it any more.
            {"pointsman_circuit_state{upstream='a'}": "0 2 2 1x80"},
        ),
        labels={**GATEWAY, "upstream": "a"},
    ),
    "PointsmanRetryBudgetSpent": Case(
        fires=(budget(1),),
        value="20",
        quiet=(budget(0), budget(0.4), budget(9, cluster="chain")),
        labels={**GATEWAY, "pointsman_upstream": "a"},
    ),
    "PointsmanDecisionsDegraded": Case(
        fires=(
            requests(served=10) | decisions(semantic=9, degraded_fast=1),
            requests(served=10) | decisions(semantic=9, degraded_deadline=0.5, degraded_worker=0.5),
        ),
        value="10%",
        quiet=(
            requests(served=99) | decisions(semantic=96, degraded_queue_full=4),
            requests(served=10) | decisions(semantic=9, degraded_body=1),
            requests(served=0.6) | decisions(semantic=0.5, degraded_fast=0.1),
        ),
    ),
    "PointsmanDecisionsSlow": Case(
        fires=(requests(served=10) | decided_within(fast=5, slow=5),),
        value="195ms",
        quiet=(
            requests(served=10) | decided_within(fast=99, slow=1),
            requests(served=10) | decided_within(fast=5, slow=5, deadline_s=5),
            requests(served=0.5) | decided_within(fast=0.2, slow=0.3),
        ),
    ),
    "PointsmanQueueNearlyFull": Case(
        fires=({"pointsman_queue_depth": "900x80", "pointsman_queue_limit": "1000x80"},),
        value="90%",
        quiet=(
            {"pointsman_queue_depth": "900x80", "pointsman_queue_limit": "2000x80"},
            {"pointsman_queue_depth": "0x70 900 0x9", "pointsman_queue_limit": "1000x80"},
        ),
        labels=POD,
    ),
    "PointsmanWorkersRestarting": Case(
        fires=({"pointsman_worker_restarts_total{cause='signal'}": "0+0.1x80"},),
        value="6",
        quiet=(
            {"pointsman_worker_restarts_total{cause='signal'}": "0x70 1x10"},
            {"pointsman_worker_restarts_total{cause='memory'}": "7x80"},
        ),
        labels=POD,
    ),
    "PointsmanSidecarAbsent": Case(
        fires=({"up": "0x80"}, {"pointsman_requests_total{outcome='served'}": "1x30"}),
        value="1",
        quiet=(requests(served=0), {"pointsman_requests_total{outcome='served'}": "1x74"}),
        labels={},
    ),
    "PointsmanSidecarDown": Case(
        fires=({"up": "1x60 0x20", "pointsman_queue_limit": "1024x60"},),
        value="0",
        quiet=(
            {"up": "1x80", "pointsman_queue_limit": "1024x80"},
            {"up": "1x75 0x5", "pointsman_queue_limit": "1024x75"},  # for a minute so far
            {"up": "0x80"},  # something that is not ours
        ),
        labels=POD,
    ),
    "PointsmanSidecarRestarting": Case(
        fires=(
            {
                "process_start_time_seconds": "1x60 2x3 3x3 4x3 5x20",
                "pointsman_queue_limit": "1024x80",
            },
        ),
        value="4",
        quiet=(
            {"process_start_time_seconds": "1x60 2x20", "pointsman_queue_limit": "1024x80"},
            {"process_start_time_seconds": "0+1x80"},  # something that is not ours
        ),
        labels=POD,
    ),
    "PointsmanSidecarBypassed": Case(
        fires=(
            requests(served=10) | decisions(semantic=9, degraded_bypassed=1),
            # It was dead: its successor counts what no record told of.
            requests(served=9)
            | decisions(semantic=9, degraded_bypassed=0)
            | {"pointsman_requests_unseen_total{cause='bypassed'}": "0+1x80"},
            # It is dead, and Envoy is scraped.
            envoy(passed=1, total=10),
        ),
        value="10%",
        quiet=(
            requests(served=99) | decisions(semantic=96, degraded_bypassed=4),
            requests(served=0.5) | decisions(semantic=0.4, degraded_bypassed=0.1),
            envoy(passed=4, total=100),
            envoy(passed=0.1, total=0.5),
        ),
    ),
    "PointsmanInternalErrors": Case(
        fires=({"pointsman_internal_errors_total": "0+0.1x80"},),
        value="4",
        quiet=({"pointsman_internal_errors_total": "5x80"},),
    ),
    "PointsmanRequestLost": Case(
        fires=({"pointsman_requests_unseen_total{cause='record_lost'}": "0+0.1x80"},),
        value="4",
        quiet=(
            {"pointsman_requests_unseen_total{cause='record_lost'}": "5x80"},
            {"pointsman_requests_unseen_total{cause='bypassed'}": "0+1x80"},
        ),
    ),
    "PointsmanEnvoyUnreadable": Case(
        fires=(reads("0+7x40 280x40", "0x40 0+1x40"),),
        value="8",
        quiet=(
            reads("0+7x80", "0x80"),
            reads("0x80", "0+1x80"),  # an Envoy of somebody else's
            reads("0+1x80", "0+1x80"),
        ),
        labels=POD,
    ),
    "PointsmanClientKeysRefused": Case(
        fires=({"pointsman_client_keys_refused": "0x60 1x20"},),
        value="",
        quiet=(
            {"pointsman_client_keys_refused": "0x80"},
            {"pointsman_client_keys_refused": "1x60 0x20"},
        ),
        labels=POD,
    ),
}
EVALUATED = "19m"
"""Late enough for every alert here, and before the series end."""


def test_every_alert_has_a_case() -> None:
    assert [alert.name for alert in rules.ALERTS] == list(CASES)


def check(directory: Path, alert: str, series: Series, expected: list[object]) -> None:
    (directory / "rules.yaml").write_text(rules.document(), encoding="utf-8")
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": labelled(name, job), "values": values}
                    for name, values in series.items()
                    for job in JOBS
                ],
                "alert_rule_test": [
                    {"eval_time": EVALUATED, "alertname": alert, "exp_alerts": expected}
                ],
            }
        ],
    }
    (directory / "test.yaml").write_text(yaml.safe_dump(test), encoding="utf-8")
    promtool("test", "rules", directory / "test.yaml")


def labelled(series: str, job: str) -> str:
    name, _, labels = series.replace("'", '"').removesuffix("}").partition("{")
    every = [f'{label}="{value}"' for label, value in {**POD, "job": job}.items()]
    return f"{name}{{{','.join([*every, *filter(None, [labels])])}}}"


def told(template: str, labels: Mapping[str, str], value: str) -> str:
    for form in ("| humanizePercentage ", "| humanizeDuration ", '| printf "%.0f" '):
        template = template.replace(f"{{{{ $value {form}}}}}", value)
    for label in ("job", "instance", "upstream", "pointsman_upstream"):
        template = template.replace(f"{{{{ $labels.{label} }}}}", labels.get(label, ""))
    assert "{{" not in template
    return template


FIRING = [(alert, series) for alert in rules.ALERTS for series in CASES[alert.name].fires]
QUIET = [(alert, series) for alert in rules.ALERTS for series in CASES[alert.name].quiet]


@pytest.mark.parametrize(("alert", "series"), FIRING, ids=lambda each: getattr(each, "name", ""))
def test_fires_and_names_the_values(alert: rules.Alert, series: Series, tmp_path: Path) -> None:
    case = CASES[alert.name]
    of_each = [{**case.labels, "job": job} for job in JOBS] if case.labels else [{}]
    expected = [
        {
            "exp_labels": {"severity": alert.severity.value, **labels},
            "exp_annotations": {
                "summary": told(alert.summary, labels, case.value),
                "description": told(alert.description, labels, case.value),
                "runbook_url": f"docs/runbooks/{alert.name}.md",
            },
        }
        for labels in of_each
    ]
    check(tmp_path, alert.name, series, expected)


@pytest.mark.parametrize(("alert", "series"), QUIET, ids=lambda each: getattr(each, "name", ""))
def test_stays_quiet(alert: rules.Alert, series: Series, tmp_path: Path) -> None:
    check(tmp_path, alert.name, series, [])


def test_file_passes_promtool(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules.document(), encoding="utf-8")
    found = len(rules.ALERTS) + len(rules.RECORDS)
    assert f"{found} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


def test_documented_prometheus_configuration_passes_promtool(tmp_path: Path) -> None:
    (found,) = re.findall(r"```yaml\n(rule_files:.*?)```", page.document(), re.DOTALL)
    (tmp_path / "rules.yaml").write_text(rules.document(), encoding="utf-8")
    (tmp_path / "prometheus.yaml").write_text(found, encoding="utf-8")
    promtool("check", "config", tmp_path / "prometheus.yaml")
