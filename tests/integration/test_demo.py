"""Every fault of the scripted upstreams as the socket shows it, and the demo as a process."""

import asyncio
import contextlib
import functools
import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import httpx
import pytest
import uvloop
from ports import free_ports

from extproc.demo.faults import BadSchema, Ending, Fault, FaultKind
from extproc.demo.seen import Ended
from extproc.demo.upstream import ScriptedUpstream

CHAT = "/v1/chat/completions"
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**QUESTION, "stream": True}
WAIT_S = 0.3


def scenario(function):
    """Run a coroutine test, bounded in time."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(function(*args, **kwargs), 30))

    return run


@contextlib.asynccontextmanager
async def scripted(name="coder", **options):
    upstream = ScriptedUpstream(name, **{"chunk_gap_s": 0.0, **options})
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.aclose()


@contextlib.asynccontextmanager
async def connection(upstream):
    reader, writer = await asyncio.open_connection(upstream.host, upstream.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(body=QUESTION, *, path=CHAT, method="POST", headers=(), close=True):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: demo", f"content-length: {len(data)}", *headers]
    lines += ["connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode() + data


@dataclass
class Wire:
    """What came back on one connection, and how the connection ended."""

    status: int | None
    headers: dict[str, str]
    body: bytes
    reset: bool

    @property
    def complete(self):
        if "content-length" in self.headers:
            return len(self.body) == int(self.headers["content-length"])
        return self.body.endswith(b"0\r\n\r\n")

    @property
    def json(self):
        return json.loads(self.body)


async def on_the_wire(upstream, body=QUESTION, **options):
    """Send one request and read to the end of the connection, whatever that is."""
    async with connection(upstream) as (reader, writer):
        writer.write(request(body, **options))
        raw, reset = b"", False
        try:
            while data := await reader.read(65_536):
                raw += data
        except ConnectionResetError:
            reset = True
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head:
        return Wire(None, {}, b"", reset)
    status, *headers = head.decode().split("\r\n")
    pairs = dict(line.lower().split(": ", 1) for line in headers)
    return Wire(int(status.split()[1]), pairs, rest, reset)


async def control(upstream, document, *, method="POST", path="/demo/fault"):
    return await on_the_wire(upstream, document, method=method, path=path)


async def received_before_silence(reader):
    received = b""
    with contextlib.suppress(TimeoutError):
        while data := await asyncio.wait_for(reader.read(65_536), WAIT_S):
            received += data
        pytest.fail("the connection ended")
    return received


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


# --- good answers


@pytest.mark.parametrize("path", [CHAT, f"/openai{CHAT}"])
@scenario
async def test_answers_as_itself_and_as_the_model_it_was_asked_for(path):
    async with scripted() as upstream:
        wire = await on_the_wire(upstream, path=path)
        assert wire.status == 200
        assert wire.json["model"] == "m"
        content = wire.json["choices"][0]["message"]["content"]
        assert content == "coder here, asked as model m: hello"
        (seen,) = upstream.seen
        assert (seen.path, seen.model, seen.ended) == (path, "m", Ended.ANSWERED)
        assert json.loads(seen.body) == QUESTION


@scenario
async def test_other_endpoints():
    async with scripted() as upstream:
        wire = await on_the_wire(
            upstream, {"prompt": "hi", "max_tokens": 3}, path="/api/v1/generate"
        )
        assert wire.json["text"] == "coder here, asked without a model: hi"
        wire = await on_the_wire(upstream, {"model": "m", "prompt": "hi"}, path="/v1/completions")
        assert wire.json["choices"][0]["text"].startswith("coder here")
        wire = await on_the_wire(upstream, {"model": "m", "input": "hi"}, path="/v1/embeddings")
        assert len(wire.json["data"][0]["embedding"]) == 8
        wire = await on_the_wire(upstream, b"", method="GET", path="/v1/models")
        assert wire.json["data"][0]["id"] == "coder"
        assert (await on_the_wire(upstream, b"", method="GET", path="/health")).status == 200
        assert (await on_the_wire(upstream, b"", method="GET", path="/nowhere")).status == 404
        assert (await on_the_wire(upstream, b"{")).status == 400
        assert "/health" not in [seen.path for seen in upstream.seen]


@scenario
async def test_stream_is_complete_and_ends_with_done():
    async with scripted(chunk_gap_s=0.001) as upstream:
        body = {**STREAM, "stream_options": {"include_usage": True}}
        wire = await on_the_wire(upstream, body)
        assert wire.headers["content-type"] == "text/event-stream"
        assert wire.complete
        assert wire.body.count(b"data: ") == 1 + 8 + 1 + 1 + 1  # role, content, final, usage, done
        assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in wire.body


@scenario
async def test_a_large_body_is_recorded_whole_and_its_client_need_not_wait_to_send_it():
    async with scripted() as upstream:
        body = json.dumps({**QUESTION, "pad": "x" * 5_000_000}).encode()
        async with connection(upstream) as (reader, writer):
            head, _, _ = request(body, headers=["expect: 100-continue"]).partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.read()
        assert upstream.seen[0].body == body


# --- faults


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["json", "stream"])
@scenario
async def test_hang_accepts_and_never_answers_and_sees_the_client_leave(body):
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.HANG))
        async with connection(upstream) as (reader, writer):
            writer.write(request(body))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), WAIT_S)
            (seen,) = upstream.seen
            assert (seen.fault, seen.ended) == ("hang", None)
            left_s = time.monotonic()
        await until(lambda: upstream.seen[0].cancelled)
        assert left_s <= upstream.seen[0].ended_at_s < left_s + 1


@pytest.mark.parametrize("status", [500, 502, 503, 429])
@scenario
async def test_5xx_answers_an_error_with_its_status(status):
    async with scripted() as upstream:
        await upstream.set_fault(
            Fault(kind=FaultKind.SERVER_ERROR, status=status, retry_after_s=2, times=1)
        )
        wire = await on_the_wire(upstream, STREAM)
        assert (wire.status, wire.headers["retry-after"]) == (status, "2")
        assert wire.json["error"]["message"]
        assert (await on_the_wire(upstream, QUESTION)).status == 200


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_reset_sends_an_rst_after_the_whole_request(loop_factory):
    async def on_this_loop():
        async with scripted() as upstream:
            await upstream.set_fault(Fault(kind=FaultKind.RESET, times=1))
            wire = await on_the_wire(upstream)
            assert (wire.status, wire.reset) == (None, True)
            (seen,) = upstream.seen
            assert (json.loads(seen.body), seen.ended) == (QUESTION, Ended.BROKEN)
            assert (await on_the_wire(upstream)).status == 200

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(on_this_loop(), 30))


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_refused_closes_the_port_and_every_connection_until_cleared(loop_factory):
    async def on_this_loop():
        async with scripted(chunk_gap_s=0.5) as upstream:
            async with connection(upstream) as idle, connection(upstream) as busy:
                idle[1].write(request(close=False))
                await idle[0].readuntil(b"hello")
                busy[1].write(request(STREAM))
                await busy[0].readuntil(b"assistant")
                await upstream.set_fault(Fault(kind=FaultKind.REFUSED))
                for reader, _ in (idle, busy):
                    with pytest.raises(ConnectionResetError):
                        await reader.read()
            with pytest.raises(ConnectionRefusedError):
                await on_the_wire(upstream)
            assert [seen.ended for seen in upstream.seen] == [Ended.ANSWERED, Ended.BROKEN]
            await upstream.set_fault(None)
            assert (await on_the_wire(upstream)).status == 200

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(on_this_loop(), 30))


@scenario
async def test_refused_for_a_time_comes_back_on_the_same_port():
    async with scripted() as upstream:
        since_s = time.monotonic()
        answer = await control(upstream, {"kind": "refused", "for_s": 1.0})
        assert answer.json["listening"] is False
        with pytest.raises(ConnectionRefusedError):
            await on_the_wire(upstream)
        await until(lambda: upstream.listening)
        assert time.monotonic() - since_s >= 1.0
        assert upstream.fault is None
        assert (await on_the_wire(upstream)).status == 200


@scenario
async def test_refused_while_refused_for_a_time_stays_refused():
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.REFUSED, for_s=0.05))
        await upstream.set_fault(Fault(kind=FaultKind.REFUSED))
        await asyncio.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):
            await on_the_wire(upstream)


@scenario
async def test_nobody_can_take_the_port_while_it_refuses():
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.REFUSED))
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind((upstream.host, upstream.port))


@scenario
async def test_refused_is_ended_through_another_upstream():
    siblings = {}
    async with (
        scripted("coder", siblings=siblings) as coder,
        scripted("general", siblings=siblings) as general,
    ):
        siblings.update(coder=coder, general=general)
        assert (await control(coder, {"kind": "refused"})).status == 200
        with pytest.raises(ConnectionRefusedError):
            await on_the_wire(coder)
        path = "/demo/fault?upstream=coder"
        state = await control(general, b"", method="GET", path=path)
        assert state.json == {"upstream": "coder", "fault": {"kind": "refused"}, "listening": False}
        # The last one that listens may not refuse without an end: nobody could switch it back.
        assert (await control(general, {"kind": "refused"})).status == 400
        assert (await control(general, b"", method="DELETE", path=path)).json["listening"] is True
        assert (await on_the_wire(coder)).status == 200


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["json", "stream"])
@pytest.mark.parametrize("variant", BadSchema)
@scenario
async def test_bad_schema_claims_success_and_offers_no_choice(variant, body):
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.BAD_SCHEMA, variant=variant))
        wire = await on_the_wire(upstream, body)
        assert wire.status == 200
        assert wire.complete
        if variant is BadSchema.HTML:
            assert wire.headers["content-type"].startswith("text/html")
            return
        assert wire.headers["content-type"] == "application/json"
        if variant is BadSchema.TORN_JSON:
            with pytest.raises(ValueError):
                _ = wire.json
        else:
            assert not wire.json.get("choices")


@scenario
async def test_flaky_fails_the_same_requests_each_time():
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.FLAKY, fail=1, of=3, status=500))
        statuses = [(await on_the_wire(upstream)).status for _ in range(6)]
        assert statuses == [500, 200, 200, 500, 200, 200]


@scenario
async def test_slow_headers_sends_nothing_before_its_delay():
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.SLOW_HEADERS, delay_s=WAIT_S))
        since_s = time.monotonic()
        async with connection(upstream) as (reader, writer):
            writer.write(request())
            assert await reader.read(1)
            assert time.monotonic() - since_s >= WAIT_S


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["json", "stream"])
@scenario
async def test_slow_first_token_sends_headers_at_once_and_then_waits(body):
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.SLOW_FIRST_TOKEN, delay_s=1.0))
        async with connection(upstream) as (reader, writer):
            writer.write(request(body))
            head = await reader.readuntil(b"\r\n\r\n")
            headers_s = time.monotonic()
            assert head.startswith(b"HTTP/1.1 200")
            rest = await reader.read(1)
            assert time.monotonic() - headers_s > 0.5
            rest += await reader.read()
            assert rest.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("after_chunks", [0, 3])
@pytest.mark.parametrize("ending", Ending)
@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["json", "stream"])
@scenario
async def test_cut_stream_ends_midway_and_never_looks_complete(body, ending, after_chunks):
    async with scripted(chunk_gap_s=0.002) as upstream:
        await upstream.set_fault(
            Fault(kind=FaultKind.CUT_STREAM, after_chunks=after_chunks, ending=ending)
        )
        wire = await on_the_wire(upstream, body)
        assert wire.status == 200
        assert wire.headers["transfer-encoding"] == "chunked"
        assert wire.reset is (ending is Ending.RESET)
        assert not wire.complete
        assert b"[DONE]" not in wire.body
        pieces = (
            wire.body.count(b'"content":"') if body is STREAM else wire.body.count(b"\r\n") // 2
        )
        role = 1 if body is STREAM and after_chunks else 0
        assert pieces == after_chunks + role
        assert upstream.seen[0].ended is Ended.BROKEN


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["json", "stream"])
@scenario
async def test_stall_stream_falls_silent_midway(body):
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.STALL_STREAM, after_chunks=2))
        async with connection(upstream) as (reader, writer):
            writer.write(request(body))
            received = await received_before_silence(reader)
            assert received.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" not in received
            assert not received.endswith(b"0\r\n\r\n")
        await until(lambda: upstream.seen[0].cancelled)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FaultKind.CONTEXT_LENGTH, "context_length_exceeded"),
        (FaultKind.CONTENT_POLICY, "content_policy_violation"),
    ],
)
@scenario
async def test_refusals_of_the_provider_are_400_with_the_openai_code(kind, code):
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=kind))
        wire = await on_the_wire(upstream, STREAM)
        assert (wire.status, wire.json["error"]["code"]) == (400, code)


@scenario
async def test_leaving_midway_through_a_good_stream_is_seen():
    async with scripted(chunk_gap_s=5) as upstream:
        async with connection(upstream) as (reader, writer):
            writer.write(request(STREAM))
            await reader.readuntil(b"assistant")
        await until(lambda: upstream.seen[0].cancelled)


@scenario
async def test_faults_spare_health_and_models():
    async with scripted() as upstream:
        await upstream.set_fault(Fault(kind=FaultKind.HANG, times=1))
        for path in ("/health", "/v1/models"):
            assert (await on_the_wire(upstream, b"", method="GET", path=path)).status == 200
        assert upstream.fault is not None


# --- control


@scenario
async def test_faults_are_switched_over_http():
    async with scripted() as upstream:
        wire = await control(upstream, {"kind": "5xx", "status": 502})
        assert wire.json["fault"] == {"kind": "5xx", "status": 502}
        assert wire.complete
        assert (await on_the_wire(upstream)).status == 502
        assert (await control(upstream, b"", method="DELETE")).json["fault"] is None
        assert (await on_the_wire(upstream)).status == 200


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"{", "error"),
        (b"[]", "JSON object"),
        ({"kind": "hung"}, "must be one of"),
        ({"kind": "hang", "upstream": "nobody"}, "known: coder"),
        ({"kind": "refused"}, "give for_s"),
    ],
)
@scenario
async def test_bad_control_requests_say_why_and_change_nothing(document, says):
    async with scripted() as upstream:
        wire = await control(upstream, document)
        assert wire.status == 400
        assert says in wire.body.decode()
        assert upstream.fault is None


@scenario
async def test_seen_over_http_shows_neither_keys_nor_prompts():
    async with scripted() as upstream:
        body = {"model": "m", "messages": [{"role": "user", "content": "my secret"}]}
        await on_the_wire(upstream, body, headers=["authorization: Bearer sk-hush"])
        assert upstream.seen[0].headers["Authorization"] == "Bearer sk-hush"
        wire = await control(upstream, b"", method="GET", path="/demo/seen?last=5")
        assert wire.json["ended"] == {"answered": 1}
        assert wire.json["last"][0]["model"] == "m"
        assert b"sk-hush" not in wire.body
        assert b"secret" not in wire.body
        await control(upstream, b"", method="DELETE", path="/demo/seen")
        assert upstream.seen == []


# --- the process


@contextlib.contextmanager
def demo_process(*arguments, **options):
    child = subprocess.Popen(
        [sys.executable, "-m", "extproc.demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_demo_serves_several_ports_and_ends_on_a_signal(number):
    first, second = free_ports(2)
    listens = [f"--listen=127.0.0.1:{first}=coder", f"--listen=127.0.0.1:{second}=general"]
    with demo_process(*listens) as child:
        line = child.stdout.readline()
        assert "ready" in line
        assert f"coder http://127.0.0.1:{first}, general http://127.0.0.1:{second}" in line
        for port, name in ((first, "coder"), (second, "general")):
            said = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=QUESTION).json()
            assert said["choices"][0]["message"]["content"].startswith(f"{name} here")
        fault = {"kind": "refused", "upstream": "coder"}
        httpx.post(f"http://127.0.0.1:{second}/demo/fault", json=fault).raise_for_status()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{first}/health")
        child.send_signal(number)
        assert child.wait(10) == 0
        assert child.stderr.read() == ""


def test_demo_on_a_busy_port_says_so_in_one_line_and_exits_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (free,) = free_ports(1)
        listens = [f"--listen=127.0.0.1:{free}=general", f"--listen=127.0.0.1:{port}=coder"]
        with demo_process(*listens) as child:
            out, err = child.communicate(timeout=20)
        assert child.returncode == 2
        assert out == ""
        assert err == (
            f"demo upstreams: cannot listen on 127.0.0.1:{port} for coder: Address already in use\n"
        )


def test_demo_ends_with_its_stdin():
    (port,) = free_ports(1)
    arguments = [f"--listen=127.0.0.1:{port}=coder", "--exit-with-stdin"]
    with demo_process(*arguments, stdin=subprocess.PIPE) as child:
        assert "ready" in child.stdout.readline()
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(10) == 0


def test_demo_refuses_to_follow_a_stdin_that_cannot_be_watched():
    arguments = ["--listen=127.0.0.1:0=a", "--exit-with-stdin"]
    with demo_process(*arguments, stdin=subprocess.DEVNULL) as child:
        _, err = child.communicate(timeout=20)
    assert child.returncode == 2
    assert "needs a pipe" in err
