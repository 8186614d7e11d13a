"""The ext_proc stream with a fake pool and gate: one legal reply to each message, whatever happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fakes import CODE, FakeEmbedder, make_plan
from prometheus_client import CollectorRegistry

from extproc.core import wire_names
from extproc.core.errors import RouteReason
from extproc.core.exchange import Plan
from extproc.core.routing import RouteRule
from extproc.metrics import Metrics
from extproc.serving import wire
from extproc.serving.servicer import Decider, Processor

DEADLINE_S = 0.15
NOW_S = 5000.0


class FrozenLoop(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return NOW_S


class FakeGate:
    def __init__(self, skip: tuple[str, ...] = (), *, error: Exception | None = None) -> None:
        self.skip = skip
        self.error = error
        self.asked: list[tuple[str, ...]] = []

    def admit(self, upstreams: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        self.asked.append(upstreams)
        if self.error is not None:
            raise self.error
        return self.skip, "run.0"


class Sidecar:
    """A processor with everything around it faked, and what it counted."""

    def __init__(
        self,
        answers: dict[str, Any] | None = None,
        gate: FakeGate | None = None,
        *,
        plan: Plan | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.embed = FakeEmbedder(answers or {})
        self.gate = gate or FakeGate()
        metrics = Metrics(
            self.registry,
            fallback_metric="model_fallback_total",
            routes=["code"],
            upstream_names=[],
        )
        self.decider = Decider(
            plan=plan or make_plan(), embed=self.embed, metrics=metrics, deadline_s=DEADLINE_S
        )
        self.processor = Processor(decider=self.decider, gate=self.gate, metrics=metrics)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def talk(self, *messages: Any, **metadata: str) -> list[Any]:
        """The replies to a stream that holds these messages."""

        async def scenario() -> list[Any]:
            talk = self.processor.Process(stream(*messages), Context(metadata))
            return [reply async for reply in talk]

        return run(scenario)


class Context:
    def __init__(self, metadata: dict[str, str]) -> None:
        self._metadata = tuple(metadata.items())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    with asyncio.Runner(loop_factory=FrozenLoop) as runner:
        return runner.run(scenario())  # type: ignore[arg-type]


async def stream(*messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def headers(phase: str = "request_headers", *, end: bool = False, **values: str) -> Any:
    message = wire.ProcessingRequest()
    part = getattr(message, phase)
    part.SetInParent()
    part.end_of_stream = end
    for key, value in values.items():
        part.headers.headers.add(key=key, raw_value=value.encode())
    return message


def post(path: str = "/v1/chat/completions") -> Any:
    return headers(**{":method": "POST", ":path": path, "content-type": "application/json"})


def body(raw: bytes | None = None, **value: Any) -> Any:
    message = wire.ProcessingRequest()
    message.request_body.body = json.dumps(value).encode() if raw is None else raw
    return message


def bare(phase: str) -> Any:
    message = wire.ProcessingRequest()
    getattr(message, phase).SetInParent()
    return message


def phase(reply: Any) -> str:
    found = reply.WhichOneof("response")
    assert found is not None  # an empty reply is illegal
    return str(found)


def sent(reply: Any) -> dict[str, str]:
    """The headers that a mutation of a request sets."""
    part = reply.request_body if reply.HasField("request_body") else reply.request_headers
    return {
        option.header.key: option.header.raw_value.decode()
        for option in part.response.header_mutation.set_headers
    }


ASK = {"model": "auto", "prompt": "hi"}


def test_headers_wait_and_the_body_gets_decision_and_rewrite_in_one_reply() -> None:
    sidecar = Sidecar({"hi": CODE})
    waiting, decided = sidecar.talk(post(), body(**ASK))
    assert waiting == wire.CONTINUE
    assert phase(decided) == "request_body"
    assert sent(decided)["x-pointsman-chain"] == "route.code"
    rewritten = decided.request_body.response.body_mutation.body
    assert json.loads(rewritten) == {"model": "coder-model", "prompt": "hi"}
    assert sent(decided)["content-length"] == str(len(rewritten))
    assert sidecar.count("pointsman_decision_seconds_count") == 1


def test_deadline_of_the_embedding_is_absolute() -> None:
    sidecar = Sidecar({"hi": CODE})
    sidecar.talk(post(), body(**ASK))
    assert sidecar.embed.calls == [("hi", NOW_S + DEADLINE_S)]


def test_header_that_a_rule_names_reaches_it() -> None:
    rules = [RouteRule("code", headers=(("x-team", "data"),)), RouteRule("chat")]
    sidecar = Sidecar(plan=make_plan(rules))
    head = post()
    head.request_headers.headers.headers.add(key="x-team", raw_value=b"data")
    _, decided = sidecar.talk(head, body(**ASK))
    assert sent(decided)["x-pointsman-reason"] == "header"
    assert sidecar.embed.calls == []


def test_explicit_model_asks_for_no_embedding() -> None:
    sidecar = Sidecar()
    _, decided = sidecar.talk(post(), body(model="coder"))
    assert sent(decided)["x-pointsman-chain"] == "upstream.coder"
    assert sidecar.embed.calls == []


@pytest.mark.parametrize("reason", [RouteReason.DEGRADED_DEADLINE, RouteReason.DEGRADED_QUEUE_FULL])
def test_embedding_that_failed_takes_the_default_route(reason: RouteReason) -> None:
    _, decided = Sidecar({"hi": reason}).talk(post(), body(**ASK))
    assert sent(decided)["x-pointsman-reason"] == reason.value


def test_gate_is_asked_about_the_chain_and_its_answer_travels() -> None:
    sidecar = Sidecar(gate=FakeGate(("coder",)))
    _, decided = sidecar.talk(post(), body(model="code"))
    assert sidecar.gate.asked == [("coder", "general")]
    assert sent(decided)["x-pointsman-skip"] == ",coder,"
    assert sent(decided)["x-pointsman-admission"] == "run.0"
    assert sent(decided)["x-pointsman-model"] == "general-model"


def test_request_without_a_body_is_decided_at_its_headers() -> None:
    (decided,) = Sidecar().talk(headers(end=True, **{":method": "GET", ":path": "/v1/files"}))
    assert phase(decided) == "request_headers"
    assert sent(decided)["x-pointsman-chain"] == "route.chat"
    assert not decided.request_headers.response.HasField("body_mutation")


def test_refusal_is_counted_by_its_code_and_asks_no_gate() -> None:
    sidecar = Sidecar()
    _, refused = sidecar.talk(post(), body(b"[]"))
    assert phase(refused) == "immediate_response"
    assert refused.immediate_response.status.code == 400
    assert sidecar.count("pointsman_rejections_total", code="body_not_object") == 1
    assert sidecar.gate.asked == []


def test_answer_that_is_no_refusal_is_not_counted_as_one() -> None:
    sidecar = Sidecar()
    (listed,) = sidecar.talk(headers(end=True, **{":method": "GET", ":path": "/v1/models"}))
    assert phase(listed) == "immediate_response"
    samples = [sample.name for family in sidecar.registry.collect() for sample in family.samples]
    assert samples
    assert "pointsman_rejections_total" not in samples


@pytest.mark.parametrize(
    "kind",
    [
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    ],
)
def test_every_kind_of_message_alone_gets_one_reply_of_its_own_phase(kind: str) -> None:
    (reply,) = Sidecar().talk(bare(kind))
    assert phase(reply) == kind


def test_trailers_behind_a_decision_are_passed_unchanged() -> None:
    replies = Sidecar().talk(post(), body(model="coder"), bare("request_trailers"))
    assert [phase(reply) for reply in replies] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]


@pytest.mark.parametrize(
    "sidecar",
    [
        Sidecar({"hi": RuntimeError("boom")}),
        Sidecar({}),  # the fake pool itself raises KeyError
        Sidecar({"hi": CODE}, FakeGate(error=RuntimeError("boom"))),
    ],
)
def test_fault_of_ours_passes_the_request_on_undecided_and_is_counted(
    sidecar: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, neutral = sidecar.talk(post(), body(**ASK))
    assert waiting == wire.CONTINUE
    assert neutral == wire.pass_unchanged(body(**ASK))
    assert sidecar.count("pointsman_internal_errors_total") == 1
    assert "hi" not in caplog.messages  # no prompt in a log


def test_messages_out_of_order_get_a_neutral_reply_each() -> None:
    sidecar = Sidecar()
    replies = sidecar.talk(
        body(model="coder"), post(), post(), body(model="coder"), body(model="coder")
    )
    assert [phase(reply) for reply in replies] == [
        "request_body",
        "request_headers",
        "request_headers",
        "request_body",
        "request_body",
    ]
    assert sidecar.count("pointsman_internal_errors_total") == 1
    assert sent(replies[3])["x-pointsman-chain"] == "upstream.coder"


def test_client_that_leaves_while_its_prompt_waits_is_no_fault() -> None:
    sidecar = Sidecar()

    async def scenario() -> None:
        waiting = asyncio.Event()

        async def never(_text: str, _deadline: float) -> Any:
            waiting.set()
            await asyncio.Event().wait()

        sidecar.decider._embed = never

        async def consume() -> None:
            async for _ in sidecar.processor.Process(stream(post(), body(**ASK)), None):
                pass

        task = asyncio.create_task(consume())
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(scenario)
    assert sidecar.count("pointsman_internal_errors_total") == 0


# --- the first-token watch ------------------------------------------------------------------------

EVENTS = {":status": "200", "content-type": "text/event-stream"}


def chunk(raw: bytes = b"data: 1\n\n") -> Any:
    message = wire.ProcessingRequest()
    message.response_body.body = raw
    return message


def test_headers_of_a_stream_are_held_until_its_first_chunk_and_no_longer_watched_then() -> None:
    sidecar = Sidecar()
    assert sidecar.talk(headers("response_headers", **EVENTS)) == []
    replies = sidecar.talk(headers("response_headers", **EVENTS), chunk(), chunk())
    # Two replies and the end of the gRPC stream: Envoy sends on the rest by itself.
    assert [phase(reply) for reply in replies] == ["response_headers", "response_body"]
    assert replies == [
        wire.pass_unchanged(headers("response_headers", **EVENTS)),
        wire.pass_unchanged(chunk()),
    ]


def test_stream_whose_first_chunk_does_not_come_in_time_is_answered_with_a_504() -> None:
    async def silent() -> AsyncIterator[Any]:
        yield headers("response_headers", **EVENTS)
        await asyncio.Event().wait()

    async def scenario() -> list[Any]:
        context = Context({wire_names.WATCH_MS: "0"})
        return [reply async for reply in Sidecar().processor.Process(silent(), context)]

    (reply,) = run(scenario)
    assert reply.immediate_response.status.code == 504


@pytest.mark.parametrize(
    "first",
    [
        headers("response_headers", **{":status": "200", "content-type": "application/json"}),
        headers("response_headers", end=True, **EVENTS),
    ],
)
def test_headers_of_any_other_answer_are_let_go_at_once(first: Any) -> None:
    (reply,) = Sidecar().talk(first)
    assert phase(reply) == "response_headers"
