"""Decisions as spans: in the caller's trace, with its moments, and only where it is sampled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fakes import FakeClock
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from extproc.core.routing import RouteScore
from extproc.serving.decided import Decided
from extproc.serving.traces import Traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", ""))
SEMANTIC = Decided(
    began_s=10.0,
    ended_s=10.05,
    route="code",
    reason="semantic",
    scores=(RouteScore("code", 0.71239, 0.4), RouteScore("chat", 0.1, 0.4)),
    embedding_ended_s=10.04,
    wait_s=0.01,
    embed_s=0.02,
)


class Told:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = Traces(endpoint="", clock=FakeClock(10.05), exporter=self.exporter)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        self.traces._provider.force_flush()
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def told() -> Iterator[Told]:
    one = Told()
    yield one
    asyncio.run(one.traces.aclose())


def length_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) * 1e-9


def test_decision_is_in_envoys_trace_with_its_phases_inside(told: Told) -> None:
    told.traces.tell(SAMPLED, SEMANTIC)
    spans = told.spans
    assert spans.keys() == {"decision", "queue", "embed", "score"}
    decision = spans["decision"]
    assert f"{decision.context.trace_id:032x}" == TRACE
    assert decision.parent is not None
    assert f"{decision.parent.span_id:016x}" == PARENT
    assert {span.parent.span_id for span in spans.values() if span.parent} == {
        decision.parent.span_id,
        decision.context.span_id,
    }
    lengths = {name: length_s(span) for name, span in spans.items()}
    assert lengths == pytest.approx(
        {"decision": 0.05, "queue": 0.01, "embed": 0.02, "score": 0.01}, abs=1e-6
    )
    assert dict(decision.attributes or {}) == {
        "pointsman.route": "code",
        "pointsman.reason": "semantic",
        "pointsman.score.code": 0.7124,
        "pointsman.score.chat": 0.1,
    }
    assert decision.status.is_unset


def test_degraded_decision_waited_and_is_marked(told: Told) -> None:
    late = Decided(10.0, 10.05, "chat", "degraded_deadline", embedding_ended_s=10.05)
    told.traces.tell(SAMPLED, late)
    assert told.spans.keys() == {"decision", "queue"}
    assert length_s(told.spans["queue"]) == pytest.approx(0.05, abs=1e-6)
    assert not told.spans["decision"].status.is_ok
    assert told.spans["decision"].status.description == "degraded_deadline"


def test_refusal_has_its_code(told: Told) -> None:
    told.traces.tell(SAMPLED, Decided(10.0, 10.0, "", "local", code="invalid_json"))
    attributes = told.spans["decision"].attributes
    assert attributes is not None
    assert attributes["pointsman.code"] == "invalid_json"


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("traceparent", f"00-{TRACE}-{PARENT}-00"),),
        (("traceparent", "nonsense"),),
        (("traceparent", f"00-{'0' * 32}-{PARENT}-01"),),
        (("traceparent", b"\xff"),),
    ],
)
def test_unsampled_or_unreadable_context_makes_no_span(
    told: Told, metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    told.traces.tell(metadata, SEMANTIC)
    assert told.spans == {}


def test_off_imports_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, extproc.app.serve, extproc.app.up, extproc.cli\n"
        "sys.exit(any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
