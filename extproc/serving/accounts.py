"""The access log service: every record that Envoy sends is counted once, and the gate learns of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc

from extproc.core import accounts
from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.metrics import Metrics, RecordKind
from extproc.serving import wire
from extproc.serving.events import Feed


class Observer(Protocol):
    """Who else wants to know how attempts and requests ended."""

    def attempt_ended(self, record: AttemptRecord) -> None: ...

    def request_ended(self, record: RequestRecord) -> None: ...


class Book(Protocol):
    """Who compares what arrives with what Envoy counted."""

    def record(self, record: RequestRecord | AttemptRecord) -> None: ...

    def batch_ended(self) -> None: ...

    def log_streams(self, count: int) -> None:
        """How many log streams are open now; none: Envoy may be gone."""


class _NoBook:
    def record(self, record: RequestRecord | AttemptRecord) -> None:
        pass

    def batch_ended(self) -> None:
        pass

    def log_streams(self, count: int) -> None:
        pass


class Accounts:
    """What a record of either kind changes: metrics, the gate, and who watches."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        observer: Observer,
        upstream_names: dict[str, str],
        feed: Feed | None = None,
    ) -> None:
        """`upstream_names`: id -> name."""
        self._metrics = metrics
        self._observer = observer
        self._names = upstream_names
        self._feed = feed or Feed()

    def request_ended(self, record: RequestRecord) -> None:
        self._metrics.request_ended(accounts.outcome(record), accounts.hops(record.attempts))
        self._metrics.decided(record.route, record.reason)
        self._observer.request_ended(record)
        self._feed.request_ended(record)

    def attempt_ended(self, record: AttemptRecord) -> None:
        name = self._names.get(record.upstream)
        if name is None:
            return
        if record.ended and not record.fail:
            self._metrics.attempt_answered(name, record)
        self._observer.attempt_ended(record)


class AccessLog(wire.AccessLogServiceServicer):  # type: ignore[misc]  # generated without types
    """Mutable state: how many log streams are open."""

    def __init__(self, accounts: Accounts, *, metrics: Metrics, book: Book | None = None) -> None:
        self._accounts = accounts
        self._metrics = metrics
        self._book = book or _NoBook()
        self._streams = 0

    async def StreamAccessLogs(  # noqa: N802  the method's name in the proto
        self, messages: AsyncIterator[Any], _context: grpc.aio.ServicerContext
    ) -> Any:
        name = ""
        self._streams += 1
        try:
            async for message in messages:
                name = wire.log_name(message) or name
                for record in wire.decode_records(name, message):
                    self._book.record(record)
                    self._count(record)
                self._book.batch_ended()
        finally:
            self._streams -= 1
            self._book.log_streams(self._streams)
        return wire.AccessLogResponse()

    def _count(self, record: RequestRecord | AttemptRecord) -> None:
        if isinstance(record, RequestRecord):
            self._metrics.record_received(RecordKind.REQUEST)
            self._accounts.request_ended(record)
        else:
            kind = RecordKind.ATTEMPT if record.ended else RecordKind.INTERIM
            self._metrics.record_received(kind)
            self._accounts.attempt_ended(record)
