"""What is read from metrics, stats, records and answers."""

import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from extproc.core.accounts import Hop
from extproc.core.circuit import State
from extproc.core.errors import FallbackReason, Outcome
from extproc.drill.events import Ended, Visit
from extproc.drill.target import (
    DrillError,
    how_ended,
    is_loopback,
    read_look,
    read_stats,
    read_totals,
    read_visits,
)
from extproc.metrics import Metrics


@pytest.fixture
def metrics():
    return Metrics(
        CollectorRegistry(),
        fallback_metric="model_fallback_total",
        routes=["chat"],
        upstream_names=["a", "b", "rule"],
    )


def text_of(metrics):
    return generate_latest(metrics.registry).decode()


def test_a_look_reads_the_sidecars_own_metrics(metrics):
    metrics.watch_circuit("a", lambda: State.HALF_OPEN)
    metrics.watch_circuit("b", lambda: State.CLOSED)
    metrics.circuit_moved("a", State.OPEN)
    metrics.circuit_moved("a", State.HALF_OPEN)
    metrics.circuit_moved("b", State.OPEN)
    look = read_look(text_of(metrics), "a", begun_s=1.0, done_s=1.1)
    assert look.state is State.HALF_OPEN
    assert look.entered == {State.CLOSED: 0, State.OPEN: 1, State.HALF_OPEN: 1}
    with pytest.raises(DrillError, match="no pointsman_circuit_state of c"):
        read_look(text_of(metrics), "c", begun_s=1.0, done_s=1.1)


def test_totals_read_what_the_gateway_counts(metrics):
    metrics.request_ended(Outcome.SERVED_BY_FALLBACK, [Hop(FallbackReason.TIMEOUT, "a", "b")])
    metrics.request_ended(Outcome.SERVED_BY_RULE, [Hop(FallbackReason.TIMEOUT, "b", "rule")])
    stats = "http.ingress.downstream_rq_total: 2\ncluster.x.ejections: 7\nserver.version: abc\n"
    totals = read_totals(
        text_of(metrics),
        read_stats(stats),
        name="a",
        fallback_metric="model_fallback_total",
        ejections="cluster.x.ejections",
        at_s=3.0,
    )
    assert totals.requests == totals.envoy_requests == 2
    assert totals.fallbacks == {"timeout": 1}
    assert totals.ejections == 7


def test_only_this_drills_visits_are_read():
    def seen(request_id):
        headers = {} if request_id is None else {"x-request-id": request_id}
        return {"ago_s": 0.5, "model": "m", "headers": headers}

    text = json.dumps({"last": [seen("drill-1-7"), seen("drill-2-7"), seen("x"), seen(None)]})
    assert list(read_visits(text, "a", "drill-1", now_s=2.0)) == [Visit("a", 7, 1.5, "m")]


@pytest.mark.parametrize(
    ("status", "body", "streams", "broke_off", "ended"),
    [
        (0, b"", False, True, Ended.NOTHING),
        (200, b'{"choices":[{}]}', False, False, Ended.WHOLE),
        (200, b'{"choices":[{}]}', False, True, Ended.BROKEN),
        (200, b'{"choices":[]}', False, False, Ended.SHORT),
        (200, b'{"choices":[', False, False, Ended.SHORT),
        (200, b"[1]", False, False, Ended.SHORT),
        (503, b'{"error":{}}', False, False, Ended.WHOLE),
        (200, b"data: {}\n\ndata: [DONE]\n\n", True, False, Ended.WHOLE),
        (200, b"data: {}\n\n", True, False, Ended.SHORT),
        (200, b"data: {}\n\n", True, True, Ended.BROKEN),
        (200, b'data: {}\n\ndata: {"error":{}}\n\n', True, False, Ended.BROKEN),
        (200, b"data: {}\n\nevent: error\ndata: gone\n\n", True, False, Ended.BROKEN),
        (200, b'data: {"choices":["\\"error\\""]}\n\ndata: [DONE]\n\n', True, False, Ended.WHOLE),
    ],
)
def test_how_an_answer_ended_is_what_its_client_can_tell(status, body, streams, broke_off, ended):
    assert how_ended(status, body, streams=streams, broke_off=broke_off) is ended


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8080", True),
        ("http://127.8.9.1", True),
        ("http://[::1]:8080/x", True),
        ("http://localhost:1", True),
        ("http://0.0.0.0:8080", False),
        ("http://10.0.0.1", False),
        ("https://llm.example/api", False),
        ("http://127.0.0.1.example", False),
        ("127.0.0.1:8080", False),
        ("", False),
    ],
)
def test_only_loopback_is_this_machine(url, here):
    assert is_loopback(url) is here
