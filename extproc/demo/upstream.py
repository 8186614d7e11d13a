"""One OpenAI-shaped upstream on a TCP port that answers, or fails as told; it knows no gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
from aiohttp import web

from extproc.demo.answers import (
    Ask,
    EventStream,
    answer_text,
    bad_answer,
    endpoint_of,
    error_answer,
    in_pieces,
    json_answer,
    models_answer,
    parse_ask,
    stream_answer,
)
from extproc.demo.faults import Ending, Fault, FaultKind, FaultSwitch, describe, parse_fault
from extproc.demo.seen import Ended, Record, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

_JSON: Final = "application/json"
_BACKLOG: Final = 2048
_COME_BACK_EVERY_S: Final = 0.1
_CLOSE_WITHIN_S: Final = 2.0
_PARTIAL: Final = (FaultKind.SLOW_FIRST_TOKEN, FaultKind.CUT_STREAM, FaultKind.STALL_STREAM)


class ScriptedUpstream:
    """An upstream for the demo, the drill and the tests; `port` 0 takes a free one.

    Everything happens on one event loop. Mutable: `chunk_gap_s`, the fault switch, the record, the
    sockets (`_reserved`, `_listener`), the exchanges in progress (`_live`) and `_come_back`.
    """

    def __init__(
        self,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        chunk_gap_s: float = 0.02,
        siblings: Mapping[str, ScriptedUpstream] | None = None,
    ) -> None:
        """`siblings`: upstreams whose fault can be switched through this one's control, by name."""
        self.name = name
        self.host = host
        self.port = port
        self.chunk_gap_s = chunk_gap_s
        self._siblings = {} if siblings is None else siblings
        self._switch = FaultSwitch()
        self._switching = asyncio.Lock()
        self._record = Record()
        self._reserved: socket.socket | None = None
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._live: dict[object, int] = {}  # connection -> serial in the record
        self._come_back: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def seen(self) -> list[Seen]:
        return self._record.all()

    @property
    def fault(self) -> Fault | None:
        return self._switch.current(now_s=time.monotonic())

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def clear_seen(self) -> None:
        self._record.clear()

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken."""
        # Held, never listening, for as long as we live: while the fault `refused` is on, the kernel
        # gives the port to nobody else, not even as the source port of an outgoing connection.
        self._reserved = _bound(self.host, self.port)
        self.port = self._reserved.getsockname()[1]
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,  # a client that leaves is seen at once
            access_log=None,
            auto_decompress=False,  # the record holds what came
        )
        try:
            await self._listen()
        except OSError:
            self._reserved.close()
            raise

    async def aclose(self) -> None:
        """Close the port and every connection, answered or not."""
        await self._stop_coming_back()
        self._stop_listening(but=None)
        if self._server is not None:
            await self._server.shutdown(_CLOSE_WITHIN_S)
        if self._reserved is not None:
            self._reserved.close()

    async def set_fault(self, fault: Fault | None) -> None:
        """Switch a fault on, in place of any other; None: answer well again.

        On return from `refused` the port is closed and every connection broken, as by a crash.
        """
        await self._set_fault(fault, but=None)

    async def _set_fault(self, fault: Fault | None, *, but: object) -> None:
        async with self._switching:
            await self._stop_coming_back()
            self._switch.set(fault, now_s=time.monotonic())
            if fault is not None and fault.kind is FaultKind.REFUSED:
                self._stop_listening(but=but)
                if fault.for_s is not None:
                    self._come_back = asyncio.create_task(self._listen_after(fault.for_s))
            elif self._listener is None:
                await self._listen()

    async def _listen(self) -> None:
        assert self._server is not None
        sock = _bound(self.host, self.port)
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._server, sock=sock, backlog=_BACKLOG
            )
        except OSError:
            sock.close()
            raise

    async def _listen_after(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:
            with contextlib.suppress(OSError):
                return await self._listen()
            await asyncio.sleep(_COME_BACK_EVERY_S)

    async def _stop_coming_back(self) -> None:
        task, self._come_back = self._come_back, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _stop_listening(self, *, but: object) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._server.connections if self._server else ():
            if connection is not but:
                self._break(connection, Ending.RESET)

    def _break(self, connection: web.RequestHandler, ending: Ending) -> None:
        """Cut a connection; what it was serving is on record as broken by us, not as left."""
        if (serial := self._live.get(connection)) is not None:
            self._record.end(serial, Ended.BROKEN, now_s=time.monotonic())
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        if ending is Ending.CLOSE:
            transport.close()
            return
        # Lingering for zero seconds: closing sends an RST instead of a FIN.
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            body = await request.content.read()
        except web.RequestPayloadError:
            raise asyncio.CancelledError from None  # a torn upload: nothing was asked
        if request.path.startswith("/demo/"):
            return await self._control(request, body)
        if request.path == "/health":
            return await _send_json(request, 200, {"status": "ok", "upstream": self.name})

        now_s = time.monotonic()
        endpoint = endpoint_of(request.path) if request.method == "POST" else None
        ask: Ask | ValueError | None = None
        if endpoint is not None:
            try:
                ask = parse_ask(endpoint, body)
            except ValueError as error:
                ask = error
        fault = self._switch.take(now_s=now_s) if endpoint is not None else None
        serial = self._record.add(
            Seen(
                method=request.method,
                path=request.path_qs,
                headers=request.headers,
                body=body,
                model=ask.model if isinstance(ask, Ask) else None,
                at_s=now_s,
                fault=fault.kind if fault else None,
            )
        )
        ended = Ended.CLIENT_LEFT
        self._live[request.protocol] = serial
        try:
            response = await self._answer(request, ask, fault, serial)
            ended = Ended.ANSWERED
        except ConnectionError:
            # Cancellation is how aiohttp itself says that the client has gone.
            raise asyncio.CancelledError from None
        else:
            return response
        finally:
            del self._live[request.protocol]
            self._record.end(serial, ended, now_s=time.monotonic())

    async def _answer(
        self,
        request: web.BaseRequest,
        ask: Ask | ValueError | None,
        fault: Fault | None,
        serial: int,
    ) -> web.StreamResponse:
        if fault is not None and (ruined := await self._ruin(request, fault)):
            return ruined
        if not isinstance(ask, Ask):
            return await self._answer_without(ask, request)
        text = answer_text(self.name, ask)
        created_s = int(time.time())
        whole = json_answer(ask, text, serial=serial, created_s=created_s)
        if fault is not None and fault.kind is FaultKind.BAD_SCHEMA:
            content_type, body = bad_answer(fault.variant, whole)
            return await _send(request, 200, body, content_type=content_type)
        if ask.stream:
            stream = stream_answer(ask, text, serial=serial, created_s=created_s)
        elif fault is not None and fault.kind in _PARTIAL:
            stream = EventStream(head=(), content=tuple(in_pieces(whole)), tail=())
        else:
            return await _send(request, 200, whole)
        content_type = "text/event-stream" if ask.stream else _JSON
        return await self._stream(request, stream, fault, content_type=content_type)

    async def _answer_without(
        self, ask: ValueError | None, request: web.BaseRequest
    ) -> web.StreamResponse:
        if ask is not None:
            return await _send_error(request, 400, str(ask), code=None)
        if request.method == "GET" and request.path.endswith("/v1/models"):
            return await _send(request, 200, models_answer(self.name))
        message = f"Invalid URL ({request.method} {request.path})"
        return await _send_error(request, 404, message, code="unknown_url")

    async def _ruin(self, request: web.BaseRequest, fault: Fault) -> web.StreamResponse | None:
        """What a fault does before there is an answer; None: the answer may follow."""
        match fault.kind:
            case FaultKind.HANG:
                await _silence()
            case FaultKind.RESET:
                self._break(request.protocol, Ending.RESET)
                await _silence()
            case FaultKind.SLOW_HEADERS:
                await asyncio.sleep(fault.delay_s)
            case FaultKind.SERVER_ERROR | FaultKind.FLAKY:
                wait_s = fault.retry_after_s
                return await _send_error(
                    request,
                    fault.status,
                    f"{self.name} was told to fail.",
                    code="rate_limit_exceeded" if fault.status == 429 else "demo_fault",
                    headers=None if wait_s is None else {"retry-after": str(wait_s)},
                )
            case FaultKind.CONTEXT_LENGTH:
                message = "This model's maximum context length is 16 tokens."
                return await _send_error(request, 400, message, code="context_length_exceeded")
            case FaultKind.CONTENT_POLICY:
                message = "Your request was rejected by our safety system."
                return await _send_error(request, 400, message, code="content_policy_violation")
            case _:
                pass
        return None

    async def _stream(
        self,
        request: web.BaseRequest,
        stream: EventStream,
        fault: Fault | None,
        *,
        content_type: str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": content_type})
        response.enable_chunked_encoding()
        await response.prepare(request)  # sends the headers at once
        kind = fault.kind if fault else None
        parts = [*stream.head, *stream.content, *stream.tail]
        if fault is not None and kind is FaultKind.SLOW_FIRST_TOKEN:
            await asyncio.sleep(fault.delay_s)
        elif fault is not None and kind in (FaultKind.CUT_STREAM, FaultKind.STALL_STREAM):
            kept = stream.content[: fault.after_chunks]
            parts = [*stream.head, *kept] if kept else []
        gap_from, gap_to = len(stream.head), len(stream.head) + len(stream.content)
        for index, part in enumerate(parts):
            if gap_from <= index < gap_to and self.chunk_gap_s:
                await asyncio.sleep(self.chunk_gap_s)
            await response.write(part)
        if fault is not None and kind is FaultKind.CUT_STREAM:
            self._break(request.protocol, fault.ending)
            await _silence()
        if kind is FaultKind.STALL_STREAM:
            await _silence()
        await response.write_eof()
        return response

    async def _control(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        try:
            document = json.loads(body) if body else {}
            if not isinstance(document, dict):
                raise ValueError("send a JSON object")  # noqa: TRY004, TRY301  one kind of refusal
            target = self._named(document.pop("upstream", None) or request.query.get("upstream"))
            answer = await self._controlled(request, document, target)
        except (ValueError, RecursionError) as error:
            return await _send_json(request, 400, {"error": str(error)}, last=True)
        return await _send_json(request, 200, answer, last=True)

    async def _controlled(
        self, request: web.BaseRequest, document: dict[str, Any], target: ScriptedUpstream
    ) -> dict[str, Any]:
        match request.method, request.path:
            case "POST", "/demo/fault":
                fault = parse_fault(document)
                others = [up for up in self._siblings.values() if up is not target and up.listening]
                if fault.kind is FaultKind.REFUSED and fault.for_s is None and not others:
                    raise ValueError("give for_s: no other upstream listens that could end this")
                await target._set_fault(fault, but=request.protocol)
            case "DELETE", "/demo/fault":
                await target._set_fault(None, but=request.protocol)
            case "GET", "/demo/seen":
                last = max(0, int(request.query.get("last", "20")))
                summary = target._record.summary(last=last, now_s=time.monotonic())
                return {"upstream": target.name, **summary}
            case "DELETE", "/demo/seen":
                target.clear_seen()
            case "GET", "/demo/fault":
                pass
            case _:
                raise ValueError("GET or DELETE /demo/seen; GET, POST or DELETE /demo/fault")
        state = {"fault": describe(target.fault), "listening": target.listening}
        return {"upstream": target.name, **state}

    def _named(self, name: object) -> ScriptedUpstream:
        if name is None or name == self.name:
            return self
        if isinstance(name, str) and name in self._siblings:
            return self._siblings[name]
        known = ", ".join(sorted({self.name, *self._siblings}))
        raise ValueError(f"no upstream {name!r} here; known: {known}")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Several sockets may be bound to one port like this, so long as only one listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


async def _silence() -> NoReturn:
    """Say nothing more; ends by cancellation, when the connection is gone."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError  # nobody holds the future


async def _send(
    request: web.BaseRequest,
    status: int,
    body: bytes,
    *,
    content_type: str = _JSON,
    headers: Mapping[str, str] | None = None,
    last: bool = False,
) -> web.StreamResponse:
    """Answer in full; `last` closes the connection afterwards."""
    response = web.Response(
        status=status, body=body, headers={"content-type": content_type, **(headers or {})}
    )
    if last:
        response.force_close()
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_json(
    request: web.BaseRequest, status: int, document: Mapping[str, Any], *, last: bool = False
) -> web.StreamResponse:
    return await _send(request, status, msgspec.json.encode(document) + b"\n", last=last)


async def _send_error(
    request: web.BaseRequest,
    status: int,
    message: str,
    *,
    code: str | None,
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    type_ = "server_error" if status >= 500 else "invalid_request_error"
    body = error_answer(message, code=code, type_=type_)
    return await _send(request, status, body, headers=headers)
