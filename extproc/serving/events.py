"""Requests as they end, for whoever watches: a bounded queue for each, and nothing when nobody does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from extproc.core import accounts
from extproc.core.accounts import RequestRecord

BACKLOG: Final = 1000
"""Events that wait for one slow watcher; more are dropped, and it is told how many."""
MOST_WATCHERS: Final = 16
KEEPALIVE_S: Final = 10.0
REMEMBERED: Final = 40
"""Of the last requests, for whoever comes to look: the status page."""
_PATH: Final = 256
_ID: Final = 64

FIELDS: Final = {
    "id": "`x-request-id`, 64 characters",
    "outcome": "as in `pointsman_requests_total`",
    "status": "as sent to the client; 0: nothing was",
    "method": "16 characters",
    "path": "without its query; 256 characters",
    "route": "where the request was sent",
    "reason": "how the route was chosen",
    "upstream": "who answered",
    "attempts": "each upstream tried and what came of it",
    "fallback": "the first reason for going further",
    "flags": "Envoy's response flags, by name",
    "duration_s": "until the response ended",
    "ended_s": "when, in seconds since 1970",
}


class TooManyWatchersError(Exception):
    """As many watch as may."""


class _Watcher:
    """Mutable state: `queue`, `dropped`. Filled on the serving loop, emptied on the watcher's."""

    def __init__(self) -> None:
        self.queue: deque[bytes] = deque()
        self.dropped = 0
        self.wake = asyncio.Event()
        self.loop = asyncio.get_running_loop()


class Feed:
    """Mutable state: the watchers, and the last requests.

    `watch` is called on another loop than everything else.
    """

    def __init__(self) -> None:
        self._watchers: tuple[_Watcher, ...] = ()
        self._last: deque[RequestRecord] = deque(maxlen=REMEMBERED)

    def last(self) -> tuple[RequestRecord, ...]:
        """The newest first."""
        return tuple(reversed(self._last))

    def request_ended(self, record: RequestRecord) -> None:
        self._last.append(record)
        watchers = self._watchers
        if not watchers:
            return
        event = msgspec.json.encode(describe(record))
        for watcher in watchers:
            if len(watcher.queue) >= BACKLOG:
                watcher.dropped += 1
                continue
            watcher.queue.append(event)
            if len(watcher.queue) == 1:
                try:
                    watcher.loop.call_soon_threadsafe(watcher.wake.set)
                except RuntimeError:  # its loop is closed, and it with it
                    continue

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events until the watcher leaves; comments in between. Raise TooManyWatchersError."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise TooManyWatchersError
        watcher = _Watcher()
        self._watchers = (*self._watchers, watcher)
        try:
            yield b": watching\n\n"
            while True:
                watcher.wake.clear()
                if watcher.queue:
                    batch = [watcher.queue.popleft() for _ in range(len(watcher.queue))]
                    yield b"".join(b"data: " + event + b"\n\n" for event in batch)
                if watcher.dropped:
                    dropped, watcher.dropped = watcher.dropped, 0
                    yield b"event: dropped\ndata: %d\n\n" % dropped
                if watcher.queue:
                    continue
                try:
                    await asyncio.wait_for(watcher.wake.wait(), KEEPALIVE_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._watchers = tuple(each for each in self._watchers if each is not watcher)


def describe(record: RequestRecord) -> dict[str, object]:
    """A request for a watcher: no header, no body, no query."""
    return {
        "id": record.request_id[:_ID],
        "outcome": accounts.outcome(record).value,
        "status": record.status,
        "method": record.method[:16],
        "path": record.path.partition("?")[0][:_PATH],
        "route": record.route,
        "reason": record.reason,
        "upstream": record.upstream,
        "attempts": record.attempts,
        "fallback": record.fallback,
        "flags": sorted(record.flags),
        "duration_s": record.duration_s,
        "ended_s": record.ended_s,
    }
