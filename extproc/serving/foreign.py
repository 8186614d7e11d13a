"""The ext_proc stream of an Envoy that is not ours: tells where a request goes, hears what came of it.

It decides nothing. The stream lives until the answer's headers come by, so the replica that decided
learns of the answer, whichever Envoy asked and however many replicas there are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from extproc.core import foreign, wire_names
from extproc.core.accounts import RequestRecord
from extproc.core.exchange import Continue, Exchange, Mutation, Respond
from extproc.core.foreign import Answer, Visit
from extproc.core.ledger import Found
from extproc.metrics import Metrics
from extproc.serving import wire
from extproc.serving.accounts import Accounts
from extproc.serving.servicer import Decider, Gatekeeper

_log = logging.getLogger(__name__)

_NOTHING: Final = Mutation({}, None)
_CANCEL_FOLLOWS_S: Final = 0.05
"""Of a stream that was reset, gRPC ends the messages first, and cancels its task a moment later."""


class ForeignProcessor(wire.ExternalProcessorServicer):  # type: ignore[misc]  # generated without types
    """Mutable state: whether a drain is on, which tasks wait for an answer, whether it complained."""

    def __init__(
        self,
        *,
        decider: Decider,
        gate: Gatekeeper,
        metrics: Metrics,
        accounts: Accounts,
        upstream_names: dict[str, str],
        rule_text: str | None,
    ) -> None:
        """`upstream_names`: id -> name; `rule_text`: None where no chain ends in the rule."""
        self.decider = decider
        self.gate = gate
        self.metrics = metrics
        self.accounts = accounts
        self.names = upstream_names
        self.rule_text = rule_text
        self._draining = False
        self._waiting: set[asyncio.Task[Any]] = set()
        self._complained = False

    def drain(self) -> None:
        """End the streams that only wait for an answer, cleanly: Envoy sends it on without us."""
        self._draining = True
        for task in self._waiting:
            task.cancel()

    async def Process(  # noqa: N802  the method's name in the proto
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        stream = _Stream(self)
        try:
            while (message := await self._next(requests, stream)) is not None:
                yield await stream.reply(message, context)
                if stream.is_over:
                    return
            if not self._draining:
                await asyncio.sleep(_CANCEL_FOLLOWS_S)
            stream.lose()
        finally:
            stream.abandon()  # cancelled: the client has left

    async def _next(self, requests: AsyncIterator[Any], stream: _Stream) -> Any:
        """The next message; None at the end, and in a drain if only an answer is waited for."""
        if stream.visit is None:
            return await anext(requests, None)
        if self._draining:
            return None
        # No task of its own for the wait: it is on every request's way.
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await anext(requests, None)
        except asyncio.CancelledError:
            if not self._draining:
                raise
            task.uncancel()
            return None
        finally:
            self._waiting.discard(task)

    def complain_of_mode(self, mode: str) -> None:
        """Once: it is one line of that Envoy's configuration."""
        if mode not in ("", "BUFFERED") and not self._complained:
            self._complained = True
            _log.error(
                "the Envoy in front sends request bodies as %s, so that no prompt can be read: "
                "set the ext_proc filter's request body mode to BUFFERED",
                mode,
            )


class _Stream:
    """One request. Mutable state: all fields."""

    def __init__(self, processor: ForeignProcessor) -> None:
        self._processor = processor
        self._exchange = Exchange(processor.decider.plan)
        self._spoofed: tuple[str, ...] = ()
        self._head = ("", "", "")
        self._sent_s = 0.0
        self._faulty = False
        self.visit: Visit | None = None
        """Under way, until its answer is here."""
        self.is_over = False

    async def reply(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        if message.HasField("response_headers"):
            return self._told(message)
        if message.HasField("request_headers"):
            self._processor.complain_of_mode(wire.body_mode(message))
            self._spoofed = wire.spoofed(message)
            self._head = wire.head(message)
        try:
            return await self._decide(message, context)
        except Exception:  # noqa: BLE001  the stream is the boundary
            _log.exception("request passed on undecided", extra={"request_id": self._head[2]})
            if not self._faulty:  # once a request
                self._processor.metrics.internal_error()
            self._faulty = True
            return wire.encode_mutation(
                _NOTHING,
                in_headers_phase=message.HasField("request_headers"),
                remove=self._spoofed,
            )

    async def _decide(self, message: Any, context: grpc.aio.ServicerContext) -> Any:
        here = self._processor
        action = await here.decider.decide(self._exchange, message, context)
        if action is None:
            return wire.pass_unchanged(message)
        if isinstance(action, Continue):
            return wire.CONTINUE
        method, path, request_id = self._head
        if isinstance(action, Respond):
            self.is_over = True
            here.accounts.request_ended(
                RequestRecord(
                    status=action.status,
                    flags=frozenset(),
                    route=action.headers[wire_names.ROUTE],
                    reason=action.headers[wire_names.REASON],
                    upstream=action.headers[wire_names.UPSTREAM],
                    attempts=action.headers[wire_names.ATTEMPTS],
                    request_id=request_id,
                    method=method,
                    path=path,
                    ended_s=time.time(),
                )
            )
            return wire.encode_respond(action)
        skip, admission = here.gate.admit(action.chain.upstreams)
        visit = foreign.visit(
            action,
            here.names,
            has_rule=here.rule_text is not None,
            skip=skip,
            admission=admission,
            method=method,
            path=path,
            request_id=request_id,
        )
        if visit.upstream is None:
            self.is_over = True
            reply = foreign.last_resort(
                visit,
                here.rule_text or "",
                stream=action.body is not None and action.body.stream,
                id_=secrets.token_hex(12),
                created=int(time.time()),
            )
            here.accounts.request_ended(visit.request(Answer(reply.status), ended_s=time.time()))
            return wire.encode_respond(reply)
        self.visit = visit
        self._sent_s = time.perf_counter()
        mutation = visit.mutation()
        return wire.encode_mutation(
            mutation,
            in_headers_phase=message.HasField("request_headers"),
            remove=[name for name in self._spoofed if name not in mutation.headers],
        )

    def _told(self, message: Any) -> Any:
        answer = wire.decode_answer(message)
        self.is_over = True
        visit, self.visit = self.visit, None
        if visit is None:  # our own fault had sent it on undecided
            self._count_undecided(answer.status, frozenset())
            return wire.pass_unchanged(message)
        took_s = time.perf_counter() - self._sent_s
        self._count(visit, answer, took_s)
        story = visit.story(answer)
        spoofed = wire.spoofed(message)
        return wire.encode_told(story, [name for name in spoofed if name not in story])

    def lose(self) -> None:
        """The stream has ended well before the answer: nobody will tell."""
        self.is_over = True
        visit, self.visit = self.visit, None
        if visit is not None:
            self._processor.accounts.attempt_ended(visit.attempt(None))
        self._processor.metrics.requests_unseen(Found(record_lost=1))

    def abandon(self) -> None:
        """The stream was cancelled, unless it is over: the client has left."""
        if self.is_over:
            return
        self.is_over = True
        visit, self.visit = self.visit, None
        if visit is not None:
            self._count(visit, None, None)
        else:
            self._count_undecided(0, foreign.CLIENT_LEFT)

    def _count_undecided(self, status: int, flags: frozenset[str]) -> None:
        method, path, request_id = self._head
        self._processor.accounts.request_ended(
            RequestRecord(
                status=status,
                flags=flags,
                request_id=request_id,
                method=method,
                path=path,
                ended_s=time.time(),
            )
        )

    def _count(self, visit: Visit, answer: Answer | None, took_s: float | None) -> None:
        accounts = self._processor.accounts
        accounts.attempt_ended(visit.attempt(answer, took_s=took_s))
        accounts.request_ended(visit.request(answer, took_s=took_s, ended_s=time.time()))
