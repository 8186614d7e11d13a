"""One trace of a request: client, Envoy, the sidecar's decision, each attempt; seen by a real receiver."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from gateway import CHAT, HOST, ROUTES, Gateway, ask, free_ports, gateway, scenario, until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from extproc.envoyconf.tracing import ATTEMPT_TAGS, REQUEST_TAGS

pytestmark = pytest.mark.envoy

SEMANTIC = ROUTES + 'utterances = ["write a python function", "fix this compiler error"]\n'
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any] = field(hash=False)
    seconds: float = 0.0


class Receiver(pb_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  as in the proto
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [read(named.get("service.name", ""), span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    async def of(self, trace: str, count: int) -> dict[str, Span]:
        """Spans of a trace by name, as soon as there are so many."""
        await until(lambda: len([s for s in self.spans if s.trace == trace]) >= count, within_s=20)
        return {span.name: span for span in self.spans if span.trace == trace}


def read(service: str, span: Any) -> Span:
    attributes = {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in span.attributes
    }
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) * 1e-9
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    return Span(service, span.name, *ids, attributes, seconds)


@contextlib.asynccontextmanager
async def traced(routes: str = ROUTES, more: str = "") -> AsyncIterator[tuple[Gateway, Receiver]]:
    receiver = Receiver()
    server = grpc.aio.server()
    pb_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    table = f'[tracing]\nendpoint = "http://{HOST}:{port}"\n{more}'
    try:
        async with gateway(table + routes) as running:
            yield running, receiver
    finally:
        await server.stop(None)


def context(*, sampled: bool = True, trace: str = TRACE) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{PARENT}-{int(sampled):02d}"}


PROCESS = "async envoy.service.ext_proc.v3.ExternalProcessor.Process egress"
REQUEST_ID = "11111111-1111-4111-8111-111111111111"


@scenario
async def test_one_trace_from_the_client_over_the_decision_to_each_attempt() -> None:
    async with traced(SEMANTIC) as (running, receiver):
        await running.fault("fallback", "5xx", status=501)
        answer = await running.client.post(
            f"{CHAT}?key=query-secret",
            json=ask("please write a python function"),
            headers={**context(), "x-request-id": REQUEST_ID, "authorization": "Bearer sk-secret"},
        )
        assert answer.headers["x-request-id"] == REQUEST_ID
        spans = await receiver.of(TRACE, 8)
        request, decision = spans["request"], spans["decision"]
        failed, served = spans["attempt vllm-fallback"], spans["attempt vllm-primary"]
        assert request.parent == PARENT
        assert {failed.parent, served.parent, spans[PROCESS].parent} == {request.id}
        assert (decision.service, decision.parent) == ("pointsman-sidecar", spans[PROCESS].id)
        phases = [spans[name] for name in ("queue", "embed", "score")]
        assert {phase.parent for phase in phases} == {decision.id}
        assert sum(phase.seconds for phase in phases) <= decision.seconds + 1e-6
        assert decision.attributes["pointsman.reason"] == "semantic"
        assert decision.attributes["pointsman.score.code"] > 0.3

        assert request.attributes["guid:x-request-id"] == REQUEST_ID
        assert {f"pointsman.{key}" for key in ("route", "fallback")} <= request.attributes.keys()
        assert request.attributes.keys() >= REQUEST_TAGS.keys()
        assert request.attributes["pointsman.attempts"] == answer.headers["x-pointsman-attempts"]
        assert failed.attributes["pointsman.fail"] == "5xx"
        assert "pointsman.fail" not in served.attributes
        assert served.attributes.keys() >= ATTEMPT_TAGS.keys() - {"pointsman.fail"}
        assert "secret" not in json.dumps([span.attributes for span in receiver.spans])

        seen = running.upstreams["primary"].seen[-1]
        headers = {key.lower(): value for key, value in dict(seen.headers).items()}
        assert headers["traceparent"] == f"00-{TRACE}-{served.id}-01"
        assert headers["x-request-id"] == REQUEST_ID


@scenario
async def test_callers_decision_not_to_sample_is_kept_everywhere() -> None:
    async with traced() as (running, receiver):
        for number in range(5):
            trace = f"{number:031x}1"
            assert (
                await running.chat(headers=context(sampled=False, trace=trace))
            ).status_code == 200
        await running.chat(headers=context())
        assert (await receiver.of(TRACE, 4)).keys() >= {"request", "decision"}
        assert {span.trace for span in receiver.spans} == {TRACE}


@scenario
async def test_sampling_of_0_begins_no_trace_and_continues_a_callers() -> None:
    async with traced(more="sampling = 0.0\n") as (running, receiver):
        for _ in range(5):
            assert (await running.chat()).status_code == 200
        await running.chat(headers=context())
        await receiver.of(TRACE, 4)
        assert {span.trace for span in receiver.spans} == {TRACE}


@scenario
async def test_receiver_that_is_away_costs_no_request() -> None:
    port = free_ports(1)[0]
    async with gateway(f'[tracing]\nendpoint = "http://{HOST}:{port}"\n{ROUTES}') as running:
        answers = await asyncio.gather(*(running.chat() for _ in range(30)))
        assert {answer.status_code for answer in answers} == {200}
        reasons = {answer.headers["x-pointsman-reason"] for answer in answers}
        assert reasons == {"default"}
