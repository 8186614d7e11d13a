"""What a scrape shows: whole from the first one on, parseable, and bounded whatever records say."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from extproc.core import errors
from extproc.core.accounts import AttemptRecord, Hop
from extproc.core.circuit import State
from extproc.core.errors import FallbackReason, Outcome, RouteReason
from extproc.core.ledger import Found, Tally
from extproc.embedding.service import Fault
from extproc.metrics import Metrics


class Cause(StrEnum):
    DIED = "died"


UPSTREAMS = ("vllm-a", "vllm-b", "rule")
STREAMED = AttemptRecord(
    upstream="a",
    status=200,
    flags=frozenset(),
    time_to_headers_s=0.2,
    route="code",
    is_stream=True,
    time_to_first_chunk_s=0.3,
    time_to_last_byte_s=1.3,
    prompt_tokens=7,
    completion_tokens=11,
)
ANSWERED = AttemptRecord("a", 200, frozenset(), time_to_headers_s=0.2)


def make(fallback_metric: str = "model_fallback_total") -> Metrics:
    return Metrics(
        CollectorRegistry(),
        fallback_metric=fallback_metric,
        routes=("code", "chat", "explicit"),
        upstream_names=UPSTREAMS,
    )


def scrape(metrics: Metrics) -> dict[str, Metric]:
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def series(metrics: Metrics) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in scrape(metrics).values()
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_every_outcome_is_there_before_the_first_request() -> None:
    samples = scrape(make())["pointsman_requests"].samples
    totals = {s.labels["outcome"]: s.value for s in samples if s.name.endswith("_total")}
    assert totals == {outcome.value: 0.0 for outcome in Outcome}


def test_names_are_those_that_were_promised() -> None:
    metrics = make()
    metrics.request_ended(Outcome.SERVED, [Hop(FallbackReason.TIMEOUT, "vllm-a", "vllm-b")])
    metrics.decided("code", "semantic")
    metrics.watch_circuit("vllm-a", lambda: State.OPEN)
    metrics.circuit_moved("vllm-a", State.OPEN)
    metrics.attempt_answered("vllm-a", ANSWERED)
    metrics.worker_restarted(Cause.DIED)
    metrics.skipped(Cause.DIED)
    names = {name for name, _ in series(metrics)}
    assert names >= {
        "model_fallback_total",
        "pointsman_requests_total",
        "pointsman_decisions_total",
        "pointsman_decision_seconds_bucket",
        "pointsman_embed_seconds_bucket",
        "pointsman_queue_depth",
        "pointsman_worker_restarts_total",
        "pointsman_circuit_state",
        "pointsman_circuit_transitions_total",
        "pointsman_time_to_headers_seconds_bucket",
    }


@pytest.mark.parametrize("name", ["model_fallback_total", "model_fallback", "acme:fallbacks"])
def test_fallbacks_are_counted_under_the_configured_name(name: str) -> None:
    metrics = make(name)
    metrics.request_ended(Outcome.SERVED, [Hop(FallbackReason.TIMEOUT, "vllm-a", "rule")])
    sample = name.removesuffix("_total") + "_total"
    assert value(metrics, sample, reason="timeout", **{"from": "vllm-a", "to": "rule"}) == 1.0


def test_each_step_and_each_request_counts_once() -> None:
    metrics = make()
    hops = [
        Hop(FallbackReason.TIMEOUT, "vllm-a", "vllm-b"),
        Hop(FallbackReason.SERVER_ERROR, "vllm-b", "rule"),
    ]
    metrics.request_ended(Outcome.SERVED_BY_RULE, hops)
    metrics.request_ended(Outcome.SERVED_BY_RULE, hops)
    assert value(metrics, "pointsman_requests_total", outcome="served_by_rule") == 2.0
    labels = {"reason": "5xx", "from": "vllm-b", "to": "rule"}
    assert value(metrics, "model_fallback_total", **labels) == 2.0


@given(st.text(max_size=8), st.text(max_size=8))
def test_values_that_are_not_of_the_closed_sets_add_no_series(one: str, other: str) -> None:
    metrics = make()
    before = series(metrics)
    metrics.decided(one, "semantic")
    metrics.decided("code", other)
    metrics.request_ended(Outcome.SERVED, [Hop(FallbackReason.TIMEOUT, one, "rule")])
    metrics.request_ended(Outcome.SERVED, [Hop(FallbackReason.TIMEOUT, "vllm-a", other)])
    metrics.attempt_answered(one, ANSWERED)
    known = {"code", "chat", "explicit", *UPSTREAMS, *RouteReason}
    if not {one, other} & known:
        assert series(metrics) == before
    metrics.attempt_answered("vllm-a", replace(STREAMED, route=other))
    routes = {value for _, labels in series(metrics) for key, value in labels if key == "route"}
    assert routes <= {"code", "chat", "explicit"}


def test_series_are_bounded_by_the_configuration() -> None:
    """Everything that can be told is told; what a scrape holds then is all it will ever hold."""
    metrics = make()
    for route, reason in product(("code", "chat", "explicit"), RouteReason):
        metrics.decided(route, reason.value)
    hops = [Hop(*hop) for hop in product(FallbackReason, UPSTREAMS, UPSTREAMS)]
    metrics.request_ended(Outcome.SERVED, hops)
    for upstream, route in product(UPSTREAMS, ("code", "chat", "explicit")):
        metrics.attempt_answered(upstream, replace(STREAMED, route=route))
        metrics.attempt_answered(upstream, replace(STREAMED, route=route, prompt_tokens=None))
        metrics.watch_circuit(upstream, lambda: State.OPEN)
        for state in State:
            metrics.circuit_moved(upstream, state)
    for fault in Fault:
        metrics.call_failed(fault)
    kinds = [value for value in vars(errors).values() if isinstance(value, errors.ErrorKind)]
    for kind in kinds:
        metrics.rejected(kind.code)
    upstreams, routes = len(UPSTREAMS), 3
    bound = (
        len(FallbackReason) * upstreams**2
        + len(RouteReason) * routes
        + upstreams * (routes * 2 + 60)  # tokens; three histograms, circuits, answers
        + len(kinds)
        + 100  # without labels, or with closed sets of a few values
    )
    # A served sidecar shows no `_created` samples.
    assert sum(not name.endswith("_created") for name, _ in series(metrics)) <= bound


def test_every_reason_of_a_route_counts() -> None:
    metrics = make()
    for reason in RouteReason:
        metrics.decided("code", reason.value)
        assert value(metrics, "pointsman_decisions_total", route="code", reason=reason.value) == 1.0


@pytest.mark.parametrize(
    ("state", "shown"), [(State.CLOSED, 0.0), (State.HALF_OPEN, 1.0), (State.OPEN, 2.0)]
)
def test_state_of_a_circuit_is_read_at_the_scrape(state: State, shown: float) -> None:
    metrics = make()
    states = [State.CLOSED]
    metrics.watch_circuit("vllm-a", lambda: states[-1])
    states.append(state)
    assert value(metrics, "pointsman_circuit_state", upstream="vllm-a") == shown


def test_two_gateways_in_one_process_share_nothing() -> None:
    one, other = make(), make()
    one.internal_error()
    assert value(one, "pointsman_internal_errors_total") == 1.0
    assert value(other, "pointsman_internal_errors_total") == 0.0


def test_exposition_survives_any_label_of_the_closed_sets() -> None:
    metrics = make()
    metrics.rejected("invalid_json")
    metrics.embedded(wait_s=0.001, embed_s=0.002)
    metrics.skipped(Cause.DIED)
    metrics.queue_depth(3)
    metrics.decision_took(0.01)
    families = scrape(metrics)
    assert value(metrics, "pointsman_queue_depth") == 3.0
    assert {sample.value for sample in families["pointsman_queue_skipped"].samples} >= {1.0}


def test_streams_tell_their_times_and_tokens() -> None:
    metrics = make()
    metrics.attempt_answered("vllm-a", STREAMED)
    first = "pointsman_time_to_first_token_seconds_sum"
    assert value(metrics, first, upstream="vllm-a") == pytest.approx(0.3)
    # 11 tokens in the second behind the first chunk: ten gaps.
    assert value(metrics, "pointsman_token_gap_seconds_sum", upstream="vllm-a") == pytest.approx(
        0.1
    )
    tokens = {"upstream": "vllm-a", "route": "code"}
    assert value(metrics, "pointsman_tokens_total", kind="prompt", **tokens) == 7
    assert value(metrics, "pointsman_tokens_total", kind="completion", **tokens) == 11
    assert value(metrics, "pointsman_answers_total", upstream="vllm-a", usage="reported") == 1


def test_losses_and_the_offset_show_as_found() -> None:
    metrics = make()
    metrics.requests_unseen(Found(bypassed=3, record_lost=2, records=9))
    metrics.account_offset(Tally(10, 1, 20))
    assert value(metrics, "pointsman_requests_unseen_total", cause="bypassed") == 3
    assert value(metrics, "pointsman_requests_unseen_total", cause="record_lost") == 2
    assert value(metrics, "pointsman_records_lost_total") == 9
    assert value(metrics, "pointsman_account_offset", of="records") == 20


def test_limits_of_the_configuration_are_metrics() -> None:
    metrics = make()
    metrics.limits(deadline_s=0.15, queue=1024, workers=3)
    assert value(metrics, "pointsman_decision_deadline_seconds") == 0.15
    assert value(metrics, "pointsman_queue_limit") == 1024
    assert value(metrics, "pointsman_workers") == 3


def test_what_alerts_ask_for_is_there_before_it_happens() -> None:
    """`increase` does not see the first event of a series that begins with it."""
    metrics = make()
    metrics.may_happen(restarts=Cause, skips=Cause)
    metrics.watch_circuit("vllm-a", lambda: State.CLOSED)
    for reason in RouteReason:
        shown = value(metrics, "pointsman_decisions_total", route="chat", reason=reason.value)
        assert shown == (0.0 if reason.value.startswith("degraded_") else None)
    assert value(metrics, "pointsman_worker_restarts_total", cause="died") == 0
    assert value(metrics, "pointsman_queue_skipped_total", cause="died") == 0
    assert value(metrics, "pointsman_circuit_transitions_total", upstream="vllm-a", to="open") == 0
    assert value(metrics, "pointsman_answers_total", upstream="vllm-a", usage="absent") == 0


def test_calls_to_an_embedding_service_are_told() -> None:
    metrics = make()
    metrics.call_sent(3)
    metrics.call_failed(Fault.TIMEOUT)
    metrics.service_ready(ready=True)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in scrape(metrics).values()
        for sample in family.samples
    }
    assert found["pointsman_embed_batch_size_sum",] == 3
    assert found["pointsman_embed_batch_size_bucket", "2.0"] == 0
    assert found["pointsman_embed_batch_size_bucket", "4.0"] == 1
    assert found["pointsman_embedding_failures_total", "timeout"] == 1
    assert found["pointsman_embedding_service_ready",] == 1


def test_refused_client_keys_show_until_good_ones_come() -> None:
    metrics = make()
    assert value(metrics, "pointsman_client_keys_refused") == 0
    metrics.keys_reloaded(ok=False)
    assert value(metrics, "pointsman_client_keys_refused") == 1
    metrics.keys_reloaded(ok=True)
    assert value(metrics, "pointsman_client_keys_refused") == 0
