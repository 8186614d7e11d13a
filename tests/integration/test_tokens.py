"""Usage and the times of a stream, out of answers that pass Envoy untouched however odd they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from gateway import CHAT, HOST, ROUTES, Gateway, ask, gateway, scenario

pytestmark = pytest.mark.envoy

Pieces = AsyncIterator[bytes]
EVENTS = "text/event-stream"
JSON = "application/json"


class RawUpstream:
    """Answers with the very bytes that it is told to, chunked as they come."""

    def __init__(self) -> None:
        self.content_type = EVENTS
        self.content_length: int | None = None
        self.pieces: Callable[[], Pieces] = lambda: whole(b"")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next(
                line.partition(":")[2] for line in head.splitlines() if "content-length" in line
            )
            await reader.readexactly(int(length))
            known = self.content_length is not None
            framing = (
                f"content-length: {self.content_length}" if known else "transfer-encoding: chunked"
            )
            writer.write(
                f"HTTP/1.1 200 OK\r\ncontent-type: {self.content_type}\r\n{framing}\r\n"
                "connection: close\r\n\r\n".encode()
            )
            async for piece in self.pieces():
                writer.write(piece if known else b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"" if known else b"0\r\n\r\n")
            await writer.drain()
        writer.close()

    def answer(self, *pieces: bytes, content_type: str = EVENTS, sized: bool = False) -> bytes:
        self.content_type = content_type
        self.content_length = sum(map(len, pieces)) if sized else None
        self.pieces = lambda: whole(*pieces)
        return b"".join(pieces)


async def whole(*pieces: bytes) -> Pieces:
    for piece in pieces:
        yield piece


@contextlib.asynccontextmanager
async def with_raw(config: str = ROUTES, **more: str) -> AsyncIterator[tuple[Gateway, RawUpstream]]:
    raw = RawUpstream()
    await raw.start()
    table = f'[upstream.raw]\nmodel = "m"\nbase_url = "http://{HOST}:{raw.port}"\n'
    try:
        async with gateway(table + config, **more) as running:
            yield running, raw
    finally:
        await raw.aclose()


async def tokens(running: Gateway, upstream: str, kind: str, **labels: str) -> float:
    return await running.metric("pointsman_tokens_total", upstream=upstream, kind=kind, **labels)


def event(**document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@scenario
async def test_usage_counts_by_upstream_route_and_kind_streams_where_asked() -> None:
    async with gateway() as running:
        said = (await running.chat()).json()["usage"]
        stream = ask(stream=True, stream_options={"include_usage": True})
        assert (await running.chat(stream)).status_code == 200
        assert (await running.chat(ask(stream=True))).status_code == 200
        assert (await running.chat(ask("a traceback"))).headers["x-pointsman-route"] == "code"
        await running.settled("pointsman_answers_total", 4)
        name, chat = "vllm-primary", {"route": "chat"}
        assert await tokens(running, name, "prompt", **chat) == 2 * said["prompt_tokens"]
        assert await tokens(running, name, "completion", **chat) == 2 * said["completion_tokens"]
        assert await tokens(running, "vllm-fallback", "completion", route="code") > 0
        assert await running.metric("pointsman_answers_total", usage="absent") == 1
        first = "pointsman_time_to_first_token_seconds_count"
        assert await running.metric(first, upstream=name) == 2
        # Without usage nobody knows how many tokens a chunk holds.
        assert await running.metric("pointsman_token_gap_seconds_count", upstream=name) == 1


@scenario
async def test_failed_attempt_has_no_tokens_and_its_successor_has() -> None:
    async with gateway() as running:
        await running.fault("primary", "5xx")
        assert (await running.chat()).headers["x-pointsman-upstream"] == "vllm-fallback"
        await running.settled("pointsman_answers_total", 1)
        assert await tokens(running, "vllm-primary", "completion") == 0
        assert await tokens(running, "vllm-fallback", "completion") > 0


@scenario
async def test_stream_is_never_held_back() -> None:
    async with with_raw() as (running, raw):
        seen = asyncio.Event()

        async def pieces() -> Pieces:
            yield b"data: {"  # half an event is enough to see
            await asyncio.wait_for(seen.wait(), 5)
            yield b'"a": 1}\n\n' + event(usage=USAGE, choices=[])

        raw.answer()
        raw.pieces = pieces
        async with running.client.stream("POST", CHAT, json=ask(model="raw", stream=True)) as got:
            parts = got.aiter_raw()
            assert await anext(parts) == b"data: {"
            seen.set()
            rest = b"".join([part async for part in parts])
        assert rest.endswith(event(usage=USAGE, choices=[]))
        await running.settled("pointsman_answers_total", 1, usage="reported")
        assert await tokens(running, "raw", "completion", route="explicit") == 5


ODD_STREAMS = {
    "no JSON": b"data: hello\n\n",
    "no event at all": b"\x00\xff\xfe" * 1000,
    "an event over every limit": b'data: {"usage": "' + b"x" * 300_000 + b'"}\n\n',
    "usage is null": event(usage=None),
    "usage is a list": event(usage=[1, 2]),
    "counts are text": event(usage={"prompt_tokens": "7", "completion_tokens": "many"}),
    "counts are negative": event(usage={"prompt_tokens": -7, "completion_tokens": -5}),
    "counts are huge": b'data: {"usage": {"prompt_tokens": 1e300, "completion_tokens": 1e999}}\n\n',
    "nested too deeply": b'data: {"usage":' + b"[" * 5000 + b"]" * 5000 + b"}\n\n",
    "torn": b'data: {"usage": {"prompt_tokens": 7, "compl',
    "bad UTF-8": b'data: {"usage": {"prompt_tokens": "\xff"}}\n\n',
    "nothing": b"",
}
READ_STREAMS = {
    "line ends of DOS": b"data: " + json.dumps({"usage": USAGE}).encode() + b"\r\n\r\n",
    "no space": b'data:{"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n',
    "several lines": b'data: {"usage":\ndata: {"prompt_tokens": 7, "completion_tokens": 5}}\n\n',
    "comments and names": b": ping\n\nevent: x\nid: 1\n" + event(usage=USAGE),
    "counts that grow": event(usage={**USAGE, "completion_tokens": 1}) + event(usage=USAGE),
    "usage in every chunk, null at last": event(usage=USAGE) + event(usage=None),
}


async def streamed(running: Gateway, path: str = CHAT) -> httpx.Response:
    return await running.client.post(path, json=ask(model="raw", stream=True))


@scenario
async def test_odd_streams_pass_byte_for_byte() -> None:
    async with with_raw() as (running, raw):
        for number, (name, body) in enumerate(ODD_STREAMS.items(), 1):
            sent = raw.answer(body) if body else raw.answer()
            got = await streamed(running)
            assert (got.status_code, got.content) == (200, sent), name
            await running.settled("pointsman_answers_total", number)
        assert await running.metric("pointsman_requests_total", outcome="served") == len(
            ODD_STREAMS
        )
        # Text that is a number counts as one; nothing else was believed.
        assert await tokens(running, "raw", "prompt") == 7
        assert await tokens(running, "raw", "completion") == 0


@scenario
async def test_streams_of_every_spelling_are_read() -> None:
    async with with_raw() as (running, raw):
        for number, (name, body) in enumerate(READ_STREAMS.items(), 1):
            # One byte a chunk: events arrive torn wherever they can be.
            sent = raw.answer(
                *(bytes([byte]) for byte in body), content_type=f"{EVENTS}; charset=utf-8"
            )
            assert (await streamed(running)).content == sent
            await running.settled("pointsman_answers_total", number)
            found = [await tokens(running, "raw", kind) for kind in ("prompt", "completion")]
            assert found == [7 * number, 5 * number], name


def completion(usage: str) -> bytes:
    return b'{"choices":[{"message":{}}],"usage":' + usage.encode() + b"}"


@scenario
async def test_odd_usage_in_json_is_served_and_not_believed() -> None:
    async with with_raw() as (running, raw):
        odd = ["null", "[]", '"7"', "{}", '{"prompt_tokens":-1}', '{"prompt_tokens":1.5}']
        odd += ['{"prompt_tokens":99999999999999999999}', '{"prompt_tokens":"7"}', "1e999"]
        for number, usage in enumerate(odd, 1):
            sent = raw.answer(completion(usage), content_type=JSON)
            got = await running.chat(ask(model="raw"))
            assert (got.status_code, got.content) == (200, sent), usage
            await running.settled("pointsman_answers_total", number, usage="absent")
        assert await tokens(running, "raw", "prompt") == 0


@scenario
async def test_answers_that_are_no_completions_are_read_only_if_small_and_never_held_otherwise() -> (
    None
):
    async with with_raw(server_keys='max_body = "1MiB"') as (running, raw):

        async def embed() -> httpx.Response:
            body = {"model": "raw", "input": "text"}
            return await running.client.post("/v1/embeddings", json=body)

        small = b'{"data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}'
        sent = raw.answer(small, content_type=JSON, sized=True)
        assert (await embed()).content == sent
        await running.settled("pointsman_answers_total", 1, usage="reported")
        # Three times what Envoy may buffer: of known size, and of unknown.
        for number, sized in enumerate((True, False), 1):
            large = b'{"data":"' + b"x" * (3 << 20) + b'",' + small[1:]
            sent = raw.answer(large, content_type=JSON, sized=sized)
            got = await embed()
            assert got.status_code == 200
            assert got.content == sent
            await running.settled("pointsman_answers_total", number, usage="absent")
        assert await tokens(running, "raw", "prompt") == 7
