"""The ext_proc stream: carries out what the exchange asks for, under the deadline; decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc

from extproc.core.exchange import (
    Continue,
    Embedded,
    Exchange,
    Forward,
    NeedEmbedding,
    NotEmbedded,
    Plan,
    Respond,
)
from extproc.metrics import Metrics
from extproc.serving import wire

_log = logging.getLogger(__name__)

Embed = Callable[[str, float], Awaitable[Embedded | NotEmbedded]]
"""Text and absolute deadline (loop.time() seconds) -> vectors, or why there are none; never late."""


class Gatekeeper(Protocol):
    """Which upstreams of a chain are not worth trying now."""

    def admit(self, upstreams: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        """Upstream ids to skip, and the admission string that travels with the request."""
        ...


class Processor(wire.ExternalProcessorServicer):  # type: ignore[misc]  # generated without types
    """Holds no state of its own: one Exchange lives as long as its stream."""

    def __init__(
        self, *, plan: Plan, embed: Embed, gate: Gatekeeper, metrics: Metrics, deadline_s: float
    ) -> None:
        self._plan = plan
        self._embed = embed
        self._gate = gate
        self._metrics = metrics
        self._deadline_s = deadline_s

    async def Process(  # noqa: N802  the method's name in the proto
        self, requests: AsyncIterator[Any], _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        exchange = Exchange(self._plan)
        async for message in requests:
            if wire.is_response_phase(message):
                async for reply in _watch_first_token(message, requests):
                    yield reply
                return
            try:
                reply = await self._answer(exchange, message)
            except Exception:  # noqa: BLE001  the stream is the boundary
                # The request must not die of our bug: unchanged, Envoy sends it down the default
                # chain, marked as having passed the sidecar by.
                _log.exception("request passed on undecided")
                self._metrics.internal_error()
                reply = wire.pass_unchanged(message)
            yield reply

    async def _answer(self, exchange: Exchange, message: Any) -> Any:
        loop = asyncio.get_running_loop()
        started = loop.time()
        event = wire.decode(message)
        if event is None:
            return wire.pass_unchanged(message)
        in_headers_phase = message.HasField("request_headers")
        action = exchange.receive(event)
        if isinstance(action, NeedEmbedding):
            embedded = await self._embed(action.text, started + self._deadline_s)
            action = exchange.receive(embedded)
        if isinstance(action, Continue):
            return wire.CONTINUE
        if isinstance(action, Respond):
            if action.code is not None:
                self._metrics.rejected(action.code)
            return wire.encode_respond(action)
        assert isinstance(action, Forward)
        skip, admission = self._gate.admit(action.chain.upstreams)
        self._metrics.decision_took(loop.time() - started)
        return wire.encode_mutation(
            action.mutation(skip=skip, admission=admission), in_headers_phase=in_headers_phase
        )


async def _watch_first_token(first: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The stream of a tier's watch: hold the reply to a stream's headers until its first chunk.

    Envoy's message_timeout on the held reply is the first-token timeout; while it runs, the tier
    has sent nothing on, and the chain can still take the next upstream. Then the gRPC stream ends,
    cleanly: Envoy sends the rest of the answer on by itself, and our death breaks no live stream.
    """
    if wire.begins_stream(first):
        async for message in requests:
            yield wire.pass_unchanged(first)
            yield wire.pass_unchanged(message)
            return
    else:
        yield wire.pass_unchanged(first)
