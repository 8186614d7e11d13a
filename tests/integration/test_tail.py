"""`pointsman tail` on a running gateway: each request once, as it ends, and only those asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator

import pytest
from gateway import HOST, Gateway, ask, gateway, scenario

pytestmark = pytest.mark.envoy


@contextlib.asynccontextmanager
async def tailing(running: Gateway, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.cli", "tail", "--config", str(running.config_path)),
        *more,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def watching(running: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection to /events, past its first comment."""
    reader, writer = await asyncio.open_connection(HOST, running.metrics_port)
    writer.write(b"GET /events HTTP/1.1\r\nhost: a\r\n\r\n")
    await reader.readuntil(b": watching\n\n")
    return reader, writer


async def until_watched(running: Gateway, process: asyncio.subprocess.Process) -> list[str]:
    """Requests until one shows: then the watcher is there."""
    assert process.stdout is not None
    first = asyncio.create_task(process.stdout.readline())
    while not first.done():
        await running.chat(headers={"x-request-id": "probe"})
        await asyncio.wait([first], timeout=0.2)
    return [(await first).decode()]


@scenario
async def test_requests_show_as_they_end_filtered_and_parseable() -> None:
    async with gateway() as running, tailing(running, "--json", "--outcome", "served") as process:
        assert process.stdout is not None
        (probe,) = await until_watched(running, process)
        assert json.loads(probe)["id"] == "probe"
        await running.fault("primary", "5xx", status=500)
        await running.chat(headers={"x-request-id": "fell-back"})
        await running.fault("primary", None)
        await running.chat(
            ask("a traceback"),
            headers={"x-request-id": "mine"},
            path="/v1/chat/completions?k=secret",
        )
        shown = [json.loads(await asyncio.wait_for(process.stdout.readline(), 10))]
        while shown[-1]["id"] == "probe":
            shown.append(json.loads(await asyncio.wait_for(process.stdout.readline(), 10)))
        last = shown[-1]
        assert (last["id"], last["outcome"], last["route"]) == ("mine", "served", "code")
        assert (last["path"], last["method"]) == ("/v1/chat/completions", "POST")
        assert last["reason"] == "keyword"
        assert 0 < last["duration_s"] < 30


@scenario
async def test_a_restarted_sidecar_is_waited_for() -> None:
    async with gateway() as running, tailing(running, "--json") as process:
        assert process.stdout is not None
        await until_watched(running, process)
        running.kill_sidecar()
        while "lost" not in json.loads(await asyncio.wait_for(process.stdout.readline(), 10)):
            pass
        await running.start_sidecar()
        (line,) = await until_watched(running, process)
        assert json.loads(line)["id"] == "probe"


@scenario
async def test_count_ends_it_and_a_dead_sidecar_is_named() -> None:
    async with gateway() as running:
        async with tailing(running, "--count", "1") as process:
            (line,) = await until_watched(running, process)
            assert "served" in line
            assert "\x1b" not in line  # no terminal
            assert await asyncio.wait_for(process.wait(), 10) == 0
        running.kill_sidecar()
        async with tailing(running) as process:
            assert process.stderr is not None
            assert b"no events from" in await process.stderr.read()
            assert await process.wait() == 1


@scenario
async def test_watcher_keeps_neither_scrapes_nor_the_end_waiting() -> None:
    async with gateway() as running:
        reader, writer = await watching(running)
        await running.chat()
        assert b'"outcome":"served"' in await reader.readuntil(b"}\n\n")
        assert await running.metric("pointsman_requests_total", outcome="served") == 1
        assert running.sidecar is not None
        assert running.envoy is not None
        running.envoy.terminate()
        running.envoy.wait()
        running.sidecar.terminate()
        await asyncio.wait_for(asyncio.to_thread(running.sidecar.wait), 15)
        writer.close()
