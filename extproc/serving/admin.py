"""The sidecar's own HTTP listener: /metrics, /healthz, /readyz, on a thread and loop of its own.

Load on the event loop that serves Envoy can so neither delay a probe nor make one kill the pod.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

STALE_BEAT_S = 15.0
"""A serving loop silent for longer is stuck, and only a restart helps."""


class Health:
    """Mutable state: `ready`, and the serving loop's last beat (monotonic seconds)."""

    def __init__(self) -> None:
        self.ready = False
        self._beat_s = time.monotonic()

    def beat(self) -> None:
        self._beat_s = time.monotonic()

    @property
    def is_live(self) -> bool:
        return time.monotonic() - self._beat_s < STALE_BEAT_S


class AdminServer:
    def __init__(
        self, *, host: str, port: int, registry: CollectorRegistry, health: Health
    ) -> None:
        self._host = host
        self._port = port
        self._registry = registry
        self._health = health
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Raise OSError when the address cannot be bound."""
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name="admin", daemon=True
        )
        self._thread.start()
        started.result(timeout=10)

    def stop(self) -> None:
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=5)

    async def _run(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        runner = web.AppRunner(app, handle_signals=False, access_log=None)
        try:
            await runner.setup()
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            await runner.cleanup()
            started.set_exception(error)
            return
        started.set_result(None)
        await self._stop.wait()
        await runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def _healthz(self, _request: web.Request) -> web.Response:
        if self._health.is_live:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="the serving loop is stuck\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._health.ready and self._health.is_live:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="not ready\n")
