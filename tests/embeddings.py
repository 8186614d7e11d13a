"""An OpenAI-compatible embeddings service with the real default model, and faults on request.

    python tests/embeddings.py PORT

`POST /fault {"kind": ...}` makes each call after it fail that way; null mends it. `GET /seen` tells the
headers and the body's keys of the last call, and how many calls and connections there were.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from ports import HOST, free_ports

from extproc.embedding.encoder import Encoder
from extproc.embedding.model import default_cache_dir, ensure_model

START_S = 30.0


# --- the service, in a process of its own --------------------------------------------------------------


class Model:
    def __init__(self) -> None:
        files = ensure_model(None, cache_dir=default_cache_dir(os.environ), progress=print)
        self._encoder = Encoder(files)
        self.fault: str | None = None
        self.calls = 0
        self.connections: set[Any] = set()
        self.last: dict[str, Any] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [
                web.post("/v1/embeddings", self.embeddings),
                web.post("/fault", self.set_fault),
                web.get("/seen", self.seen),
            ]
        )
        return app

    async def set_fault(self, request: web.Request) -> web.Response:
        self.fault = (await request.json())["kind"]
        return web.Response()

    async def seen(self, _: web.Request) -> web.Response:
        counts = {"calls": self.calls, "connections": len(self.connections)}
        return web.json_response(self.last | counts)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.calls += 1
        self.connections.add(request.transport)
        self.last = {"headers": dict(request.headers), "keys": sorted(asked)}
        match self.fault:
            case "hang":
                await asyncio.sleep(3600)
            case "5xx":
                return web.json_response({"error": "busy"}, status=503)
            case "429":
                return web.json_response({"error": "slow down"}, status=429)
            case "401":
                return web.json_response({"error": "no such key"}, status=401)
            case "redirect":
                return web.Response(status=307, headers={"location": "http://127.0.0.1:9/"})
            case "html":
                return web.Response(text="<html>", content_type="text/html")
            case "reset":
                assert request.transport is not None
                request.transport.abort()
            case "race" if (
                self.calls % 2
            ):  # every second one: what a closed idle connection looks like
                assert request.transport is not None
                request.transport.abort()
            case "floats only" if asked.get("encoding_format") == "base64":
                words = "base64 encoding is not currently supported"
                return web.json_response({"message": words}, status=400)
        body = json.dumps(self.answer(asked)).encode()
        if self.fault == "torn json":
            body = body[: len(body) // 2]
        if self.fault == "endless":
            body = b" " * (2 << 20)
        if self.fault == "torn body":
            response = web.StreamResponse(headers={"content-length": str(len(body))})
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(body=body, content_type="application/json")

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        vectors = np.concatenate([self._encoder.encode(text)[:1] for text in asked["input"]])
        if self.fault == "other dimension":
            vectors = vectors[:, :256]
        if self.fault == "one short":
            vectors = vectors[:-1]

        def written(vector: Any) -> Any:
            if asked.get("encoding_format") == "base64" and self.fault != "floats":
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return [float(number) for number in vector]

        data = [{"index": at, "embedding": written(each)} for at, each in enumerate(vectors)]
        return {"object": "list", "data": data[::-1], "model": "use-m3"}


def main(port: int) -> None:
    model = Model()
    web.run_app(model.app(), host=HOST, port=port, print=None, shutdown_timeout=0)


# --- what a test holds of it ------------------------------------------------------------------------------


class Embeddings:
    """Mutable: the process, which may be stopped, killed and started again on the same port."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://{HOST}:{self.port}/v1/embeddings"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, str(self.port)])
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    await self.seen()
                    return
                assert self._process.poll() is None
                await asyncio.sleep(0.05)

    async def fault(self, kind: str | None) -> None:
        async with aiohttp.ClientSession() as session:
            url = f"http://{HOST}:{self.port}/fault"
            async with session.post(url, json={"kind": kind}) as response:
                assert response.status == 200

    async def seen(self) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{HOST}:{self.port}/seen") as response,
        ):
            found: dict[str, Any] = await response.json()
            return found

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


if __name__ == "__main__":
    main(int(sys.argv[1]))
