"""The stream of an Envoy that is not ours, with a fake pool and gate: told, judged, counted once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import CODE, FakeEmbedder, make_plan
from prometheus_client import CollectorRegistry

from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.metrics import Metrics
from extproc.serving import wire
from extproc.serving.accounts import Accounts
from extproc.serving.foreign import ForeignProcessor
from extproc.serving.servicer import Decider

ASK = {"model": "auto", "prompt": "hi"}


class Gate:
    """Skips what it is told to, and remembers what it hears."""

    def __init__(self, skip: tuple[str, ...] = (), *, error: Exception | None = None) -> None:
        self.skip = skip
        self.error = error
        self.attempts: list[AttemptRecord] = []
        self.requests: list[RequestRecord] = []

    def admit(self, _upstreams: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        if self.error is not None:
            raise self.error
        return self.skip, "run.0"

    def attempt_ended(self, record: AttemptRecord) -> None:
        self.attempts.append(record)

    def request_ended(self, record: RequestRecord) -> None:
        self.requests.append(record)


class Sidecar:
    def __init__(self, gate: Gate | None = None, *, rule_text: str | None = "busy") -> None:
        self.registry = CollectorRegistry()
        self.gate = gate or Gate()
        names = {"coder": "vllm-coder", "general": "g"}
        metrics = Metrics(
            self.registry,
            fallback_metric="model_fallback_total",
            routes=["code", "chat"],
            upstream_names=[*names.values(), "rule"],
        )
        self.processor = ForeignProcessor(
            decider=Decider(
                plan=make_plan(), embed=FakeEmbedder({"hi": CODE}), metrics=metrics, deadline_s=1
            ),
            gate=self.gate,
            metrics=metrics,
            accounts=Accounts(metrics=metrics, observer=self.gate, upstream_names=names),
            upstream_names=names,
            rule_text=rule_text,
        )

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def talk(self, *messages: Any) -> list[Any]:
        async def stream() -> AsyncIterator[Any]:
            for message in messages:
                yield message

        async def scenario() -> list[Any]:
            return [reply async for reply in self.processor.Process(stream(), None)]

        return asyncio.run(scenario())


def headers(phase: str = "request_headers", **values: str) -> Any:
    message = wire.ProcessingRequest()
    part = getattr(message, phase)
    part.SetInParent()
    for key, value in values.items():
        part.headers.headers.add(key=key.replace("_", "-"), raw_value=value.encode())
    return message


def post(path: str = "/v1/chat/completions", **more: str) -> Any:
    return headers(**{":method": "POST", ":path": path, "content-type": "application/json"}, **more)


def body(**value: Any) -> Any:
    message = wire.ProcessingRequest()
    message.request_body.body = json.dumps(value).encode()
    return message


def answer(status: int, details: str = "via_upstream", **more: str) -> Any:
    message = headers("response_headers", **{":status": str(status)}, **more)
    if details:
        fields = message.attributes["envoy.filters.http.ext_proc"].fields
        fields["response.code_details"].string_value = details
    return message


def mutation(reply: Any) -> Any:
    return getattr(reply, reply.WhichOneof("response")).response.header_mutation


def sent(reply: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in mutation(reply).set_headers}


def test_decision_goes_out_and_its_answer_comes_back_on_one_stream() -> None:
    sidecar = Sidecar()
    waiting, decided, told = sidecar.talk(post(), body(**ASK), answer(200))
    assert waiting == wire.CONTINUE
    assert sent(decided)["x-pointsman-upstream"] == "vllm-coder"
    assert decided.request_body.response.clear_route_cache
    rewritten = decided.request_body.response.body_mutation.body
    assert json.loads(rewritten) == {"model": "coder-model", "prompt": "hi"}
    assert sent(told)["x-pointsman-attempts"] == "vllm-coder:200"
    assert sidecar.count("pointsman_requests_total", outcome="served") == 1
    assert sidecar.count("pointsman_decisions_total", route="code", reason="semantic") == 1
    assert sidecar.count("pointsman_time_to_headers_seconds_count", upstream="vllm-coder") == 1
    (attempt,) = sidecar.gate.attempts
    assert (attempt.upstream, attempt.admission, attempt.fail) == ("coder", "run.0", "")


def test_headers_in_our_name_are_removed_or_overwritten_on_both_ways() -> None:
    spoofed = {"x_pointsman_skip": ",coder,", "x_pointsman_route": "x"}
    _, decided, told = Sidecar().talk(
        post(**spoofed), body(**ASK), answer(200, x_pointsman_fallback="y", x_pointsman_model="z")
    )
    assert list(mutation(decided).remove_headers) == ["x-pointsman-skip"]
    assert sent(decided)["x-pointsman-route"] == "code"
    assert list(mutation(told).remove_headers) == ["x-pointsman-fallback"]
    assert sent(told)["x-pointsman-model"] == "coder-model"


def test_failure_is_news_for_the_gate_and_counted_once() -> None:
    sidecar = Sidecar()
    told = sidecar.talk(post(), body(**ASK), answer(504, "upstream_per_try_timeout"))[-1]
    assert sent(told)["x-pointsman-fallback"] == "timeout"
    assert [each.fail for each in sidecar.gate.attempts] == ["timeout"]
    assert sidecar.count("pointsman_requests_total", outcome="failed") == 1


@pytest.mark.parametrize(
    ("message", "outcome"),
    [(body(model="nobody"), "rejected"), (body(model="coder"), None)],
)
def test_refusal_is_an_immediate_response_and_counted(message: Any, outcome: str | None) -> None:
    sidecar = Sidecar()
    reply = sidecar.talk(post(), message)[-1]
    if outcome:
        assert reply.immediate_response.status.code == 404
        assert sidecar.count("pointsman_requests_total", outcome=outcome) == 1
        assert sidecar.count("pointsman_rejections_total", code="model_not_found") == 1
    else:
        assert reply.HasField("request_body")


def test_every_circuit_open_is_answered_without_that_envoys_upstreams() -> None:
    sidecar = Sidecar(Gate(skip=("coder", "general")))
    reply = sidecar.talk(post(), body(**ASK))[-1]
    assert reply.immediate_response.status.code == 200
    assert sidecar.count("pointsman_requests_total", outcome="served_by_rule") == 1
    assert not sidecar.gate.attempts
    sidecar = Sidecar(Gate(skip=("coder", "general")), rule_text=None)
    reply = sidecar.talk(post(), body(**ASK))[-1]
    assert reply.immediate_response.status.code == 503
    assert sidecar.count("pointsman_requests_total", outcome="failed") == 1


def test_stream_that_ends_before_the_answer_is_unseen_and_gives_its_trial_back() -> None:
    sidecar = Sidecar()
    sidecar.talk(post(), body(**ASK))
    assert sidecar.count("pointsman_requests_unseen_total", cause="record_lost") == 1
    assert sidecar.count("pointsman_requests_total", outcome="client_gone") == 0
    assert [each.status for each in sidecar.gate.attempts] == [0]


def test_fault_of_ours_passes_the_request_on_but_never_what_a_client_says_in_our_name() -> None:
    sidecar = Sidecar(Gate(error=RuntimeError("boom")))
    spoofed = {"x_pointsman_upstream": "vllm-coder"}
    _, passed, told = sidecar.talk(post(**spoofed), body(**ASK), answer(200))
    assert list(mutation(passed).remove_headers) == ["x-pointsman-upstream"]
    assert not passed.request_body.response.HasField("body_mutation")
    assert told == wire.pass_unchanged(answer(200))
    assert sidecar.count("pointsman_requests_total", outcome="served") == 1
    assert sidecar.count("pointsman_internal_errors_total") == 1


def test_an_answer_to_nothing_is_passed_on() -> None:
    (reply,) = Sidecar().talk(answer(200))
    assert reply == wire.pass_unchanged(answer(200))


def test_trailers_before_the_answer_get_their_reply() -> None:
    trailers = wire.ProcessingRequest()
    trailers.request_trailers.SetInParent()
    replies = Sidecar().talk(post(), body(**ASK), trailers, answer(200))
    assert [each.WhichOneof("response") for each in replies] == [
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
    ]


def test_a_client_that_leaves_while_its_prompt_waits_is_counted_too() -> None:
    sidecar = Sidecar()

    async def scenario() -> None:
        waiting = asyncio.Event()

        async def never(_text: str, _deadline: float) -> Any:
            waiting.set()
            await asyncio.Event().wait()

        sidecar.processor.decider._embed = never

        async def stream() -> AsyncIterator[Any]:
            yield post()
            yield body(**ASK)

        async def consume() -> None:
            async for _ in sidecar.processor.Process(stream(), None):
                pass

        task = asyncio.create_task(consume())
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert sidecar.count("pointsman_requests_total", outcome="client_gone") == 1
    assert sidecar.count("pointsman_internal_errors_total") == 0


def test_a_drain_ends_the_wait_for_an_answer_and_a_client_that_leaves_is_counted() -> None:
    sidecar = Sidecar()

    async def scenario() -> None:
        heard = asyncio.Event()

        async def stream() -> AsyncIterator[Any]:
            yield post()
            yield body(**ASK)
            heard.set()
            await asyncio.Event().wait()

        async def consume() -> None:
            async for _ in sidecar.processor.Process(stream(), None):
                pass

        left = asyncio.create_task(consume())
        await heard.wait()
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert sidecar.count("pointsman_requests_total", outcome="client_gone") == 1
        waits = asyncio.create_task(consume())
        heard.clear()
        await heard.wait()
        sidecar.processor.drain()
        await waits

    asyncio.run(scenario())
    assert sidecar.count("pointsman_requests_unseen_total", cause="record_lost") == 1


def test_wrong_body_mode_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = Sidecar()
    message = post()
    message.protocol_config.request_body_mode = 1
    for _ in range(2):
        sidecar.talk(message, body(**ASK))
    assert [each for each in caplog.messages if "STREAMED" in each] == caplog.messages
    assert len(caplog.messages) == 1
