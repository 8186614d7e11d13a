"""Watchers: each gets what it can take, is told what it missed, and costs nothing when not there."""

from __future__ import annotations

import asyncio
import json

import pytest

from extproc.core.accounts import RequestRecord
from extproc.serving import events
from extproc.serving.events import Feed, TooManyWatchersError, describe


def record(number: int = 0, **more: object) -> RequestRecord:
    return RequestRecord(200, frozenset(), request_id=f"id-{number}", **more)  # type: ignore[arg-type]


def ids(chunk: bytes) -> list[str]:
    return [
        json.loads(line.removeprefix("data: "))["id"]
        for line in chunk.decode().splitlines()
        if line.startswith("data: {")
    ]


def test_nobody_watches_and_nothing_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "describe", lambda _record: pytest.fail("described"))
    Feed().request_ended(record())


def test_each_watcher_gets_each_request_once_and_in_order() -> None:
    async def run() -> None:
        feed = Feed()
        one, other = feed.watch(), feed.watch()
        assert await anext(one) == await anext(other) == b": watching\n\n"
        for number in range(3):
            feed.request_ended(record(number))
        assert ids(await anext(one)) == ["id-0", "id-1", "id-2"]
        feed.request_ended(record(3))
        assert ids(await anext(one)) == ["id-3"]
        assert ids(await anext(other)) == ["id-0", "id-1", "id-2", "id-3"]
        await one.aclose()
        await other.aclose()
        assert feed._watchers == ()

    asyncio.run(run())


def test_slow_watcher_loses_what_is_beyond_its_backlog_and_learns_how_much() -> None:
    async def run() -> None:
        feed = Feed()
        watching = feed.watch()
        await anext(watching)
        for number in range(events.BACKLOG + 7):
            feed.request_ended(record(number))
        assert len(ids(await anext(watching))) == events.BACKLOG
        assert await anext(watching) == b"event: dropped\ndata: 7\n\n"
        await watching.aclose()

    asyncio.run(run())


def test_quiet_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEPALIVE_S", 0.0)

    async def run() -> None:
        watching = Feed().watch()
        await anext(watching)
        assert (await anext(watching)).startswith(b":")
        await watching.aclose()

    asyncio.run(run())


def test_watchers_are_bounded() -> None:
    async def run() -> None:
        feed = Feed()
        watchers = [feed.watch() for _ in range(events.MOST_WATCHERS)]
        for watcher in watchers:
            await anext(watcher)
        with pytest.raises(TooManyWatchersError):
            await anext(feed.watch())
        for watcher in watchers:
            await watcher.aclose()

    asyncio.run(run())


def test_event_holds_no_query_and_bounded_values() -> None:
    event = describe(record(path="/a?key=secret", method="M" * 99))
    assert event.keys() == events.FIELDS.keys()
    assert (event["path"], event["method"]) == ("/a", "M" * 16)
    assert len(str(describe(record(path="/" + "x" * 999))["path"])) == 256


def test_last_requests_are_there_without_a_watcher_the_newest_first() -> None:
    feed = Feed()
    for number in range(events.REMEMBERED + 1):
        feed.request_ended(record(number))
    told = [each.request_id for each in feed.last()]
    assert (told[0], told[-1]) == (f"id-{events.REMEMBERED}", "id-1")
