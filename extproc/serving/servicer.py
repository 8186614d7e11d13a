"""The ext_proc stream: carries out what the exchange asks for, under the deadline; decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import grpc

from extproc.core import wire_names
from extproc.core.errors import UPSTREAM_TIMEOUT, RouteReason, error_body
from extproc.core.exchange import (
    Action,
    Continue,
    Embedded,
    Exchange,
    Forward,
    NeedEmbedding,
    NotEmbedded,
    Plan,
    Respond,
    Scored,
)
from extproc.core.foreign import Reply
from extproc.metrics import Metrics
from extproc.serving import wire
from extproc.serving.decided import Decided, Tell

_log = logging.getLogger(__name__)

_NO_FIRST_TOKEN: Final = Reply(
    UPSTREAM_TIMEOUT.status, error_body(UPSTREAM_TIMEOUT), {}, UPSTREAM_TIMEOUT.code
)
"""Where nothing stands further on in the chain; else the tier labels it, and it is not sent."""

Embed = Callable[[str, float], Awaitable[Embedded | Scored | NotEmbedded]]
"""Text and absolute deadline (loop.time() seconds) -> vectors, scores, or why neither; never late."""


class Gatekeeper(Protocol):
    """Which upstreams of a chain are not worth trying now."""

    def admit(self, upstreams: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        """Upstream ids to skip, and the admission string that travels with the request."""
        ...


class Decider:
    """Feeds an exchange with what arrives, and carries out what it asks for until it has decided.

    `tell`, if there is one, learns of each decision.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        embed: Embed,
        metrics: Metrics,
        deadline_s: float,
        tell: Tell | None = None,
    ) -> None:
        self.plan = plan
        self._embed = embed
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._tell = tell

    async def decide(
        self, exchange: Exchange, message: Any, context: grpc.aio.ServicerContext
    ) -> Continue | Respond | Forward | None:
        """None: a phase that asks for nothing."""
        loop = asyncio.get_running_loop()
        started, begun = (
            loop.time(),
            time.perf_counter(),
        )  # uvloop's clock counts whole milliseconds
        event = wire.decode(message, self.plan.signals.headers)
        if event is None:
            return None
        action = exchange.receive(event)
        embedded: Embedded | Scored | NotEmbedded | None = None
        back = started
        if isinstance(action, NeedEmbedding):
            embedded = await self._embed(action.text, started + self._deadline_s)
            back = loop.time()
            action = exchange.receive(embedded)
        if isinstance(action, Continue):
            return action
        if self._tell is not None:
            decided = _decided(action, started, loop.time(), embedded, back)
            self._tell(tuple(context.invocation_metadata() or ()), decided)
        if isinstance(action, Respond):
            if action.code is not None:
                self._metrics.rejected(action.code)
            return action
        assert isinstance(action, Forward)
        self._metrics.decision_took(time.perf_counter() - begun)
        return action


class Processor(wire.ExternalProcessorServicer):  # type: ignore[misc]  # generated without types
    """Holds no state of its own: one Exchange lives as long as its stream."""

    def __init__(
        self,
        *,
        decider: Decider,
        gate: Gatekeeper,
        metrics: Metrics,
        passed_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`passed_on` is told of each request that our own fault sent on undecided."""
        self._decider = decider
        self._gate = gate
        self._metrics = metrics
        self._passed_on = passed_on

    async def Process(  # noqa: N802  the method's name in the proto
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        exchange = Exchange(self._decider.plan)
        undecided = False
        first: Any = None
        async for message in requests:
            first = first or message
            if wire.is_response_phase(message):
                async for reply in _watch_first_token(message, requests, context):
                    yield reply
                return
            try:
                reply = await self._answer(exchange, message, context)
            except Exception:  # noqa: BLE001  the stream is the boundary
                # The request must not die of our bug: unchanged, Envoy sends it down the default
                # chain, marked as having passed the sidecar by.
                _log.exception(
                    "request passed on undecided", extra={"request_id": wire.request_id(first)}
                )
                if not undecided:  # once a request
                    self._metrics.internal_error()
                    self._passed_on()
                undecided = True
                reply = wire.pass_unchanged(message)
            yield reply

    async def _answer(
        self, exchange: Exchange, message: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        action = await self._decider.decide(exchange, message, context)
        if action is None:
            return wire.pass_unchanged(message)
        if isinstance(action, Continue):
            return wire.CONTINUE
        if isinstance(action, Respond):
            return wire.encode_respond(action)
        skip, admission = self._gate.admit(action.chain.upstreams)
        return wire.encode_mutation(
            action.mutation(skip=skip, admission=admission),
            in_headers_phase=message.HasField("request_headers"),
        )


def _decided(
    action: Action,
    began_s: float,
    ended_s: float,
    embedded: Embedded | Scored | NotEmbedded | None,
    back_s: float,
) -> Decided:
    asked = embedded is not None
    timed = embedded if isinstance(embedded, Embedded | Scored) else None
    forward = action.decision if isinstance(action, Forward) else None
    return Decided(
        began_s=began_s,
        ended_s=ended_s,
        route=forward.route if forward else "",
        reason=(forward.reason if forward else RouteReason.LOCAL).value,
        code=(action.code or "") if isinstance(action, Respond) else "",
        scores=forward.scores if forward else (),
        embedding_ended_s=back_s if asked else None,
        wait_s=timed.wait_s if timed else 0.0,
        embed_s=timed.embed_s if timed else 0.0,
    )


def _hold_s(context: grpc.aio.ServicerContext) -> float | None:
    """Of a tier's watch: its first-token timeout."""
    told = dict(context.invocation_metadata() or ()).get(wire_names.WATCH_MS)
    return float(told) / 1000 if isinstance(told, str) and told.isdecimal() else None


async def _watch_first_token(
    first: Any, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
) -> AsyncIterator[Any]:
    """The stream of a tier's watch: hold the reply to a stream's headers until its first chunk.

    While it is held the tier has sent nothing on, and the chain can still take the next upstream;
    once the time that the tier gave is up, a 504 has it do so. With a chunk the gRPC stream ends,
    cleanly: Envoy sends the rest of the answer on by itself, and our death breaks no live stream.
    """
    if not wire.begins_stream(first):
        yield wire.pass_unchanged(first)
        return
    try:
        async with asyncio.timeout(_hold_s(context)):
            message = await anext(requests, None)
    except TimeoutError:
        yield wire.encode_respond(_NO_FIRST_TOKEN)
        return
    if message is not None:
        yield wire.pass_unchanged(first)
        yield wire.pass_unchanged(message)
