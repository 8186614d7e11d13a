"""`pointsman tail`: requests of a running gateway in the terminal, as they end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from extproc.config import load
from extproc.core.errors import Outcome
from extproc.demo import DEMO_CONFIG

_RESET: Final = "\x1b[0m"
_DIM: Final = "\x1b[2m"
COLOURS: Final[Mapping[str, str]] = {
    Outcome.SERVED: "\x1b[32m",
    Outcome.SERVED_BY_FALLBACK: "\x1b[33m",
    Outcome.SERVED_BY_RULE: "\x1b[35m",
    Outcome.REJECTED: "\x1b[36m",
    Outcome.FAILED: "\x1b[1;31m",
    Outcome.CLIENT_GONE: "\x1b[2;37m",
    Outcome.STREAM_CUT: "\x1b[31m",
}
_AGAIN_S: Final = 0.5
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=30)


class TailError(Exception):
    """There is nothing to watch, or no longer."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What to show; an empty tuple: everything. Values of one key are alternatives."""

    outcomes: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    upstreams: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    id: str = ""

    def shows(self, event: Mapping[str, Any]) -> bool:
        wanted = {
            "outcome": self.outcomes,
            "route": self.routes,
            "reason": self.reasons,
            "upstream": self.upstreams,
            "fallback": self.fallbacks,
        }
        if self.id and self.id != event["id"]:
            return False
        return all(not values or event[key] in values for key, values in wanted.items())


def tail(
    path: Path | None,
    chosen: Filter,
    *,
    show: Callable[[str], None],
    as_json: bool,
    colour: bool,
    count: int | None = None,
) -> None:
    """Show until interrupted, or `count` requests. Raise ConfigError or TailError."""
    config = load(path or DEMO_CONFIG, environ=None)
    asyncio.run(
        _tail(config.metrics.url, chosen, show=show, as_json=as_json, colour=colour, count=count)
    )


async def _tail(
    url: str,
    chosen: Filter,
    *,
    show: Callable[[str], None],
    as_json: bool,
    colour: bool,
    count: int | None,
) -> None:
    shown = 0
    async for kind, data in _patiently(url):
        if kind == "watching":
            continue
        if kind == "lost":
            show(json.dumps({"lost": data}) if as_json else f"... {data}; waiting for it")
            continue
        if kind == "dropped":
            show(
                json.dumps({"dropped": int(data)}) if as_json else f"... {data} not shown: too fast"
            )
            continue
        event = json.loads(data)
        if not chosen.shows(event):
            continue
        show(data if as_json else line(event, colour=colour))
        shown += 1
        if count is not None and shown >= count:
            return


async def _patiently(url: str) -> AsyncIterator[tuple[str, str]]:
    """The events, through restarts of the sidecar: ("lost", why) stands for each. Raise TailError where
    there was nothing to watch from the start.
    """
    watched = lost = False
    while True:
        try:
            async for event in events(url):
                watched, lost = True, False
                yield event
        except TailError as error:
            if not watched:
                raise
            if not lost:
                yield "lost", str(error)
            lost = True
        await asyncio.sleep(_AGAIN_S)


async def events(url: str) -> AsyncIterator[tuple[str, str]]:
    """(kind, data) of each server-sent event; the first is ("watching", ""). Raise TailError."""
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(f"{url}/events") as response,
        ):
            if response.status != 200:
                raise TailError(f"{url}/events: {(await response.text()).strip()}")
            yield "watching", ""
            kind = ""
            async for raw in response.content:
                text = raw.decode().rstrip("\n")
                if text.startswith("event: "):
                    kind = text.removeprefix("event: ")
                elif text.startswith("data: "):
                    yield kind, text.removeprefix("data: ")
                    kind = ""
    except (aiohttp.ClientError, TimeoutError) as error:
        gone = isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError)
        why = "the sidecar has gone" if gone else error or type(error).__name__
        raise TailError(f"no events from {url}: {why}") from error
    raise TailError(f"{url} ended the stream")


def line(event: Mapping[str, Any], *, colour: bool) -> str:
    """One request for a person; control characters of a client's never reach the terminal."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["ended_s"] or time.time()))
    took = "" if event["duration_s"] is None else f"{event['duration_s'] * 1000:.0f} ms"
    outcome = event["outcome"]
    who = event["upstream"] or "-"
    route = f"{event['route'] or '-'} ({event['reason'] or '-'})"
    story = event["attempts"] if event["fallback"] else ""
    flags = ",".join(event["flags"])
    words = [
        f"{event['status'] or '---':>3} {outcome:<18} {took:>9}  {route:<28} {who:<20}",
        _printable(f"{event['method']} {event['path']}"),
        story,
        flags,
        _printable(event["id"]),
    ]
    text = "  ".join(word for word in words if word)
    if not colour:
        return f"{clock} {text}"
    return f"{_DIM}{clock}{_RESET} {COLOURS.get(outcome, '')}{text}{_RESET}"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
