"""The status document over values: every figure, every alert, and keys that scripts can rely on."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from extproc.app.audit import Audit, Check
from extproc.app.status import FIELDS, Facts, Look, document, judge_audit, point, quantile
from extproc.config import parse
from extproc.core.accounts import RequestRecord
from extproc.core.circuit import CircuitView, State
from extproc.embedding.pool import Crew

CONFIG = parse(
    """
[upstream.big]
name = "vllm-big"
base_url = "http://x.example"
model = "big-model"
[upstream.small]
base_url = "http://y.example"
model = "small-model"
[router]
default = "chat"
queue = 10
[[route]]
name = "code"
upstreams = ["big", "small"]
keywords = ["traceback"]
[[route]]
name = "chat"
upstreams = ["small"]
""",
    file="x",
    environ=None,
)
CLOSED = CircuitView(State.CLOSED, None, 0, 0)
OPEN = CircuitView(State.OPEN, 7.4, 0, 0)
BEGAN_S, NOW_S = 1000.0, 1100.0


def look(at_s: float = NOW_S, **samples: float) -> Look:
    """`requests__outcome__served=3` is pointsman_requests_total{outcome="served"} 3."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for text, value in samples.items():
        name, *labels = text.split("__")
        pairs = frozenset(zip(labels[::2], labels[1::2], strict=True))
        metric = name if name.startswith("model_") else f"pointsman_{name}"
        sample = (
            metric
            if metric.endswith(("depth", "bucket", "ready", "refused"))
            else f"{metric}_total"
        )
        found.setdefault(sample, {})[pairs] = value
    return Look(at_s, found)


def facts(**more) -> Facts:
    circuits = {"vllm-big": CLOSED, "small": CLOSED}
    whole = Facts(
        NOW_S, ready=True, circuits=circuits, audit_state="adds_up", crew=Crew(1, 0, 1, 0)
    )
    return replace(whole, **more)


def told(now: Look | None = None, *history: Look, at: Facts | None = None):
    looks = history or (Look(BEGAN_S),)
    return document(
        CONFIG,
        at or facts(),
        looks,
        [point(*pair) for pair in itertools.pairwise(looks)],
        now or look(),
        wall_s=1.7e9,
        up_s=100.0,
    )


def codes(found) -> list[str]:
    return [alert["code"] for alert in found["alerts"]]


def test_keys_are_those_that_are_documented():
    assert list(told()) == list(FIELDS)
    json.dumps(told(), allow_nan=False)


def test_nothing_happened_yet():
    found = told()
    assert (found["state"], found["alerts"]) == ("ok", [])
    assert (found["requests"]["rate"], found["requests"]["total"]) == (0.0, 0)
    assert found["decisions"]["p95_s"] is None
    assert [route["upstreams"] for route in found["routes"]] == [
        ["vllm-big", "small", "rule"],
        ["small", "rule"],
    ]


def test_recent_is_what_the_oldest_look_does_not_hold():
    before = look(NOW_S - 90, requests__outcome__served=10)
    late = look(NOW_S - 10, requests__outcome__served=15)
    found = told(look(requests__outcome__served=35, requests__outcome__rejected=5), before, late)
    assert found["window_s"] == 90
    assert found["requests"]["outcomes"]["served"] == {"recent": 25, "total": 35}
    assert (found["requests"]["recent"], found["requests"]["total"]) == (30, 40)
    assert found["requests"]["rate"] == 2.5  # 25 in the last 10 s


def test_routes_tell_how_they_were_chosen_explicit_ones_too():
    found = told(
        look(
            decisions__route__code__reason__keyword=4,
            decisions__route__code__reason__semantic=2,
            decisions__route__explicit__reason__explicit=1,
        )
    )
    code, chat, explicit = found["routes"]
    assert (code["total"], code["reasons"]["keyword"]["total"]) == (6, 4)
    assert chat["total"] == 0
    assert (explicit["route"], explicit["upstreams"], explicit["total"]) == ("explicit", [], 1)


def test_upstream_has_its_circuit_its_answers_and_its_failures():
    found = told(
        look(
            time_to_headers_seconds_bucket__upstream__small__le__1=3,
            **{"time_to_headers_seconds_bucket__upstream__small__le__+Inf": 4},
            model_fallback__reason__timeout__from__vllm_big__to__small=0,
            tokens__upstream__small__route__chat__kind__prompt=12,
        )
    )
    big, small = found["upstreams"]
    assert big["circuit"]["state"] == "closed"
    assert (small["answered"]["total"], small["tokens"]) == (4, {"prompt": 12})
    assert small["headers_p50_s"] == pytest.approx(2 / 3)
    assert small["headers_p95_s"] == 1.0  # beyond the last bound nobody knows


def test_fallbacks_are_rows_the_busiest_first():
    one = {"reason": "5xx", "from": "small", "to": "rule"}
    other = {"reason": "timeout", "from": "vllm-big", "to": "small"}
    steps = {frozenset(one.items()): 2.0, frozenset(other.items()): 5.0}
    found = told(Look(NOW_S, {"model_fallback_total": steps}))
    assert found["fallbacks"] == [
        {**other, "recent": 5, "total": 5},
        {**one, "recent": 2, "total": 2},
    ]
    assert found["upstreams"][0]["went_on"]["total"] == 5


def test_open_circuit_is_told_with_its_countdown_and_where_requests_go():
    found = told(at=facts(at_s=NOW_S - 0.4, circuits={"vllm-big": OPEN, "small": CLOSED}))
    assert found["state"] == "degraded"
    (alert,) = found["alerts"]
    assert (alert["code"], alert["subject"]) == ("circuit_open", "vllm-big")
    assert "for 7 s more. Route code goes to small." in alert["text"]
    assert found["upstreams"][0]["circuit"]["half_open_in_s"] == 7.0


def test_half_open_circuit_is_news_but_no_degradation():
    half = CircuitView(State.HALF_OPEN, None, 0, 1)
    found = told(at=facts(circuits={"small": half}))
    assert (found["state"], codes(found)) == ("ok", ["circuit_half_open"])


def test_embedding_service_that_is_left_alone_is_told():
    (alert,) = told(look(), at=facts(encoder="timeout"))["alerts"]
    assert (alert["code"], alert["level"]) == ("encoder_away", "warning")
    assert "timeout" in alert["text"]


def test_refused_client_keys_are_told_for_as_long_as_they_are_refused():
    (alert,) = told(look(client_keys_refused=1))["alerts"]
    assert alert["code"] == "client_keys_refused"
    assert told(look(client_keys_refused=0))["alerts"] == []


def test_worst_alert_comes_first_and_names_the_state():
    found = told(
        look(
            requests__outcome__failed=1,
            requests__outcome__served_by_rule=2,
            requests__outcome__served=9,
            requests__outcome__stream_cut=3,
            decisions__route__chat__reason__degraded_fast=1,
            decisions__route__chat__reason__semantic=9,
            internal_errors=1,
            queue_depth=8,
        ),
        at=facts(crew=Crew(2, 0, 1, 0)),
    )
    assert found["state"] == "failing"
    assert codes(found) == [
        "failed",
        "internal_errors",
        "stream_cut",
        "served_by_rule",
        "degraded_decisions",
        "queue_nearly_full",
        "workers_missing",
    ]
    texts = {alert["code"]: alert["text"] for alert in found["alerts"]}
    assert texts["degraded_decisions"].startswith("1 of 10 decisions in the last minute was")
    assert found["decisions"]["degraded"] == {"degraded_fast": 1}


def test_rule_answering_most_requests_is_a_failure_though_each_is_a_200():
    found = told(look(requests__outcome__served_by_rule=6, requests__outcome__served=5))
    assert (found["state"], codes(found)) == ("failing", ["served_by_rule"])


def test_routes_whose_upstreams_are_all_skipped_go_to_the_rule():
    found = told(at=facts(circuits={"vllm-big": OPEN, "small": OPEN}))
    first, second = (alert["text"] for alert in found["alerts"])
    assert first.endswith("Route code goes to the rule answer.")
    assert second.endswith("Route chat goes to the rule answer.")


def test_what_happened_over_a_minute_ago_raises_no_alert():
    before = [look(NOW_S - ago, requests__outcome__failed=3) for ago in (90, 62, 30)]
    assert told(look(requests__outcome__failed=3), *before)["state"] == "ok"


def test_stuck_loop_and_a_start_are_told_apart():
    stuck = told(at=facts(at_s=NOW_S - 5))
    assert (stuck["state"], codes(stuck)) == ("failing", ["loop_stuck"])
    starting = told(at=Facts(NOW_S))
    assert (starting["state"], codes(starting)) == ("starting", ["starting"])


CHECK = Check("requests", 10, {"outcomes": 8, "unseen": 1}, "outcomes + unseen")


def test_difference_stands_only_while_nothing_moves():
    whole = Audit((replace(CHECK, envoy=9),), {}, is_quiet=False)
    short = Audit((CHECK,), {}, is_quiet=False)
    assert judge_audit(whole, None) == "adds_up"
    assert judge_audit(short, None) == judge_audit(short, whole) == "settling"
    assert judge_audit(short, short) == "differs"


def test_account_is_the_audits_and_a_difference_is_an_alert():
    found = told(at=facts(audit=Audit((CHECK,), {}, is_quiet=False), audit_state="differs"))
    assert found["audit"]["checks"][0]["difference"] == 1
    assert found["alerts"][0]["text"] == "The account does not add up: requests."
    assert codes(told(at=facts(audit_state="unknown"))) == ["envoy_unreadable"]


def test_history_is_columns_of_rates_and_percentiles():
    looks = [
        look(NOW_S - 4),
        look(
            NOW_S - 2,
            requests__outcome__served=6,
            requests__outcome__client_gone=2,
            decision_seconds_bucket__le__1=6,
        ),
        look(NOW_S, requests__outcome__served=6, requests__outcome__client_gone=2),
    ]
    columns = told(looks[-1], *looks)["history"]
    assert columns["ago_s"] == [2.0, 0.0]
    assert (columns["served"], columns["other"]) == ([3.0, 0.0], [1.0, 0.0])
    assert columns["p50_s"] == [0.5, None]
    assert len({len(column) for column in columns.values()}) == 1


def test_last_requests_hold_no_query():
    record = RequestRecord(200, frozenset(), request_id="id", path="/v1/x?key=secret")
    (last,) = told(at=facts(last=(record,)))["last_requests"]
    assert (last["id"], last["path"]) == ("id", "/v1/x")


def test_quantile_is_linear_inside_a_bucket():
    buckets = {0.1: 0.0, 0.2: 10.0, 0.4: 20.0, float("inf"): 20.0}
    assert quantile(buckets, 0.25) == pytest.approx(0.15)
    assert quantile(buckets, 0.5) == pytest.approx(0.2)
    assert quantile(buckets, 1.0) == pytest.approx(0.4)
    assert quantile({0.1: 0.0, float("inf"): 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None
