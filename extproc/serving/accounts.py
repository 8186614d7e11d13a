"""The access log service: every record that Envoy sends is counted once, and the gate learns of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from extproc.core import accounts
from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.metrics import Metrics
from extproc.serving import wire


class Observer(Protocol):
    """Who else wants to know how attempts and requests ended."""

    def attempt_ended(self, record: AttemptRecord) -> None: ...

    def request_ended(self, record: RequestRecord) -> None: ...


class AccessLog(wire.AccessLogServiceServicer):  # type: ignore[misc]  # generated without types
    def __init__(
        self, *, metrics: Metrics, observer: Observer, upstream_names: dict[str, str]
    ) -> None:
        """`upstream_names`: id -> name."""
        self._metrics = metrics
        self._observer = observer
        self._names = upstream_names

    async def StreamAccessLogs(  # noqa: N802  the method's name in the proto
        self, messages: AsyncIterator[Any], _context: grpc.aio.ServicerContext
    ) -> Any:
        name = ""
        async for message in messages:
            name = wire.log_name(message) or name
            for record in wire.decode_records(name, message):
                if isinstance(record, RequestRecord):
                    self._count_request(record)
                else:
                    self._count_attempt(record)
        return wire.AccessLogResponse()

    def _count_request(self, record: RequestRecord) -> None:
        self._metrics.request_ended(accounts.outcome(record), accounts.hops(record.attempts))
        self._metrics.decided(record.route, record.reason)
        self._observer.request_ended(record)

    def _count_attempt(self, record: AttemptRecord) -> None:
        name = self._names.get(record.upstream)
        if name is None:
            return
        if record.ended and record.time_to_headers_s is not None and not record.fail:
            self._metrics.attempt_answered(name, record.time_to_headers_s)
        self._observer.attempt_ended(record)
