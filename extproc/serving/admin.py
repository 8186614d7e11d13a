"""The sidecar's own HTTP listeners: /metrics, /events, the status page, /healthz, /readyz, on a thread
and loop of their own.

Load on the event loop that serves Envoy can so neither delay a probe nor make one kill the pod.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from extproc.serving import page
from extproc.serving.events import Feed, TooManyWatchersError

STALE_BEAT_S = 15.0
"""A serving loop silent for longer is stuck, and only a restart helps."""


class Health:
    """Mutable state: `ready`, the serving loop's last beat (monotonic seconds), and whom to ask for the
    embedding service's condition: empty, or why it is left alone.
    """

    def __init__(self) -> None:
        self.ready = False
        self.condition: Callable[[], str] = lambda: ""
        self._beat_s = time.monotonic()

    def beat(self) -> None:
        self._beat_s = time.monotonic()

    @property
    def is_live(self) -> bool:
        return time.monotonic() - self._beat_s < STALE_BEAT_S


class AdminServer:
    """`probes`: a second host and port that answers /healthz and /readyz alone.

    A kubelet asks from outside of the pod, where metrics need not be reachable.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        registry: CollectorRegistry,
        health: Health,
        probes: tuple[str, int] | None = None,
        feed: Feed | None = None,
        status: page.Status | None = None,
    ) -> None:
        """`status`: what the page shows; None: there is no page."""
        self._status = status
        self._host = host
        self._port = port
        self._probes = probes
        self._registry = registry
        self._health = health
        self._feed = feed or Feed()
        self._watching: set[asyncio.Task[None]] = set()
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
        probes = [web.get("/healthz", self._healthz), web.get("/readyz", self._readyz)]
        try:
            async with AsyncExitStack() as stack:
                routes = [web.get("/metrics", self._metrics), web.get("/events", self._events)]
                if self._status is not None:
                    routes += page.routes(self._status)
                await _listen(stack, self._host, self._port, [*routes, *probes])
                if self._probes is not None:
                    await _listen(stack, *self._probes, probes)
                started.set_result(None)
                await self._stop.wait()
                for task in self._watching:  # they would go on for ever
                    task.cancel()
        except OSError as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        page.guard(request)
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", "cache-control": "no-store"}
        )
        task = asyncio.create_task(self._send_events(request, response))
        self._watching.add(task)
        try:
            await task
        except TooManyWatchersError:
            return web.Response(status=503, text="too many watchers\n")
        except (asyncio.CancelledError, ConnectionError):
            task.cancel()
        finally:
            self._watching.discard(task)
        return response

    async def _send_events(self, request: web.Request, response: web.StreamResponse) -> None:
        async with aclosing(self._feed.watch()) as events:
            async for chunk in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)

    async def _healthz(self, _request: web.Request) -> web.Response:
        if self._health.is_live:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="the serving loop is stuck\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._health.ready and self._health.is_live:
            why = self._health.condition()
            return web.Response(
                text=f"ok, without the embedding service: {why}\n" if why else "ok\n"
            )
        return web.Response(status=503, text="not ready\n")


async def _listen(
    stack: AsyncExitStack, host: str, port: int, routes: Iterable[web.RouteDef]
) -> None:
    app = web.Application(client_max_size=page.MOST_BYTES)
    app.add_routes(routes)
    runner = web.AppRunner(app, handle_signals=False, access_log=None)
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
