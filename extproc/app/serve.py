"""Wires the sidecar: model, workers, plan, gate, gRPC server, admin listener; runs it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, disable_created_metrics

from extproc.app.board import Board
from extproc.app.judge import (
    EmbedFully,
    Encodes,
    Judge,
    build_static,
    fit_fast_tier,
    open_static,
)
from extproc.config import Config, Route, UnknownModel, route_chain, upstream_chain
from extproc.core.cache import DecisionCache, routes_version
from extproc.core.circuit import GateBank
from extproc.core.errors import RouteReason
from extproc.core.exchange import ChainPlan, Embedded, NotEmbedded, Plan
from extproc.core.fast import Utterances
from extproc.core.routing import (
    ModelDirectory,
    RouteRule,
    SemanticIndex,
    Vectors,
)
from extproc.core.signals import SignalTable
from extproc.core.wire_names import EXPLICIT_ROUTE, RULE
from extproc.embedding.cores import default_workers
from extproc.embedding.model import default_cache_dir, ensure_model
from extproc.embedding.pool import Crew, Pool, PoolEvents
from extproc.embedding.pool import NotEmbedded as PoolNotEmbedded
from extproc.metrics import Metrics
from extproc.serving.accounts import AccessLog
from extproc.serving.admin import AdminServer, Health
from extproc.serving.events import Feed
from extproc.serving.gate import Gate
from extproc.serving.reconcile import Reconciler
from extproc.serving.server import SidecarServer
from extproc.serving.servicer import Processor

if TYPE_CHECKING:
    from extproc.serving.traces import Traces

_log = logging.getLogger(__name__)

LEDGER_SUFFIX = ".ledger"
"""Beside the socket: what this run has accounted for, for the next one."""
DRAIN_S = 10.0
"""Streams in flight get this long; a decision takes milliseconds, so they are few."""
_BEAT_S = 0.5
_RECORD_DELAY_S = 2.0
"""How much later than an attempt's limit its record may come before its trial counts as lost."""


class TracingMissingError(Exception):
    """The packages that spans need are not installed."""


async def serve(config: Config, *, progress: Callable[[str], None]) -> None:
    """The sidecar until SIGTERM or SIGINT. Raise ModelError, OSError, SocketBusyError or
    TracingMissingError at start.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_sidecar(config, progress=progress):
        progress("sidecar ready")
        await stop.wait()


@asynccontextmanager
async def running_sidecar(
    config: Config, *, progress: Callable[[str], None]
) -> AsyncIterator[CollectorRegistry]:
    """Everything that `serve` runs, up and warm inside the block, drained behind it."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # half the lines of a scrape, and nobody's question
    registry = CollectorRegistry()
    names = {each.id: each.name for each in config.upstreams.values()}
    metrics = Metrics(
        registry,
        fallback_metric=config.fallback.metric_prefix,
        routes=[EXPLICIT_ROUTE, *(route.name for route in config.routes)],
        upstream_names=[*names.values(), RULE],
    )
    health = Health()
    feed = Feed()
    board = Board(config, registry, feed)
    admin = AdminServer(
        host=config.metrics.host,
        port=config.metrics.port,
        registry=registry,
        health=health,
        feed=feed,
        status=board,
        probes=(config.health.host, config.health.port) if config.health else None,
    )
    admin.start()  # first, so that probes are answered while the model warms up
    beat = asyncio.create_task(_beat(health))
    telling = asyncio.create_task(board.run())
    fast = asyncio.create_task(_open_static(config))  # while the workers load their model
    try:
        async with running_embedding(config, metrics, progress=progress) as embedding:
            gate = Gate(
                GateBank(
                    config.circuit,
                    {
                        each.id: config.visit_limit_s(each) + _RECORD_DELAY_S
                        for each in config.upstreams.values()
                    },
                    run=secrets.token_hex(4),
                ),
                upstream_names=names,
                clock=time.monotonic,
                metrics=metrics,
            )
            tracing = _traces(config)
            plan = compile_plan(config, embedding.utterances)
            judge = await _judge(config, embedding, plan, metrics, encoder=await fast)
            reconciler = Reconciler(
                path=config.extproc_socket + LEDGER_SUFFIX,
                admin_url=config.admin.url,
                metrics=metrics,
                on_read=board.envoy_read,
            )
            server = SidecarServer(
                socket_path=config.extproc_socket,
                processor=Processor(
                    plan=plan,
                    embed=judge,
                    gate=gate,
                    metrics=metrics,
                    deadline_s=config.router.deadline_s,
                    passed_on=reconciler.passed_on,
                    tell=tracing.tell if tracing else None,
                ),
                access_log=AccessLog(
                    metrics=metrics,
                    observer=gate,
                    upstream_names=names,
                    book=reconciler,
                    feed=feed,
                ),
                max_body_bytes=config.server.max_body_bytes,
            )
            await server.start()
            reconciler.start()
            board.serves(gate=gate, crew=embedding.crew, plan=plan, embed=judge.afresh)
            health.ready = True
            late = asyncio.create_task(_supply(config, embedding, judge))  # the cores are free now
            try:
                yield registry
            finally:
                health.ready = False
                await _cancel(late)
                await server.drain(DRAIN_S)
                await reconciler.aclose()
                if tracing is not None:
                    await tracing.aclose()
    finally:
        await _cancel(beat)
        await _cancel(telling)
        await _cancel(fast)
        await asyncio.to_thread(admin.stop)


def _traces(config: Config) -> Traces | None:
    """None when off, and then opentelemetry is not even imported."""
    if config.tracing.endpoint is None:
        return None
    try:
        from extproc.serving.traces import Traces  # noqa: PLC0415  an extra, and slow to import
    except ModuleNotFoundError as error:
        raise TracingMissingError(
            f'[tracing] needs the extra otel (no {error.name}): pip install "pointsman[otel]"'
        ) from error
    return Traces(endpoint=config.tracing.endpoint, clock=asyncio.get_running_loop().time)


def compile_plan(config: Config, vectors: Mapping[str, Vectors]) -> Plan:
    """`vectors`: the embedded utterances of each route that has any."""
    chains = {
        chain.name: ChainPlan(
            chain.name,
            chain.upstreams,
            tuple(config.upstreams[upstream].model for upstream in chain.upstreams),
        )
        for chain in config.chains()
    }
    rules = [_rule(route) for route in config.routes]
    return Plan(
        directory=ModelDirectory(
            aliases=config.router.aliases,
            upstreams={each.id: (each.name, each.model) for each in config.upstreams.values()},
            routes=[route.name for route in config.routes],
        ),
        signals=SignalTable(rules),
        index=SemanticIndex(rules, vectors),
        default_route=config.router.default,
        unknown_model_takes_default=config.router.unknown_model is UnknownModel.DEFAULT,
        route_chains={route.name: chains[route_chain(route.name)] for route in config.routes},
        upstream_chains={each: chains[upstream_chain(each)] for each in config.upstreams},
    )


def _rule(route: Route) -> RouteRule:
    return RouteRule(
        name=route.name,
        utterances=route.utterances,
        keywords=route.keywords,
        threshold=route.threshold,
        patterns=route.patterns,
        headers=route.headers,
        has=route.has,
        min_chars=route.min_chars,
        max_chars=route.max_chars,
        priority=route.priority,
    )


@dataclass(frozen=True, slots=True)
class Embedding:
    """What the router needs of the model: vectors for prompts, and those of the utterances."""

    embed: EmbedFully
    utterances: Mapping[str, Vectors]
    each: Utterances
    """The same, utterance by utterance."""
    digest: str
    crew: Callable[[], Crew] = lambda: Crew(0, 0, 0, 0)


@asynccontextmanager
async def running_embedding(
    config: Config, events: PoolEvents, *, progress: Callable[[str], None]
) -> AsyncIterator[Embedding]:
    """The workers, warm, and the routes' utterances; no worker where no route has utterances."""
    routes = [route for route in config.routes if route.utterances]
    if not routes:
        yield Embedding(_no_model, {}, {}, "")
        return
    files = ensure_model(
        config.router.encoder.path, cache_dir=default_cache_dir(os.environ), progress=progress
    )
    workers = config.router.workers or default_workers()
    pool = Pool(files, workers=workers, queue=config.router.queue, events=events)
    await pool.start()
    try:
        texts = [text for route in routes for text in route.utterances]
        vectors = iter(await pool.embed_many(texts))
        each = {route.name: [next(vectors) for _ in route.utterances] for route in routes}
        # A long utterance has two vectors; both stand for it.
        utterances = {route: np.concatenate(own) for route, own in each.items()}
        progress(
            f"{workers} worker(s) warm, {len(texts)} utterances of {len(routes)} routes embedded"
        )

        async def embed(text: str, deadline: float) -> Embedded | NotEmbedded:
            result = await pool.embed(text, deadline=deadline)
            if isinstance(result, PoolNotEmbedded):
                return NotEmbedded(result.reason)
            return Embedded(result.vectors, result.wait_s, result.embed_s)

        yield Embedding(embed, utterances, each, files.digest, pool.crew)
    finally:
        await pool.aclose()


async def _no_model(_text: str, _deadline: float) -> Embedded | NotEmbedded:
    return NotEmbedded(RouteReason.DEGRADED_WORKER)


# --- the static encoder: there from the start, or once it is built ------------------------------------


def _scored_rules(config: Config) -> list[RouteRule]:
    return [_rule(route) for route in config.routes if route.utterances]


async def _open_static(config: Config) -> Encodes | None:
    if not _scored_rules(config):
        return None
    return await asyncio.to_thread(open_static, default_cache_dir(os.environ))


async def _judge(
    config: Config,
    embedding: Embedding,
    plan: Plan,
    metrics: Metrics,
    *,
    encoder: Encodes | None,
) -> Judge:
    capacity = config.router.cache
    version = routes_version(_scored_rules(config), embedding.digest)
    judge = Judge(
        embedding.embed,
        plan.index,
        metrics,
        cascade=config.router.cascade,
        cache=DecisionCache(capacity, version) if capacity else None,
    )
    if encoder is not None:
        await _lend(judge, encoder, config, embedding)
    return judge


async def _lend(judge: Judge, encoder: Encodes, config: Config, embedding: Embedding) -> None:
    rules = _scored_rules(config)
    judge.use(await asyncio.to_thread(fit_fast_tier, encoder, rules, embedding.each))


async def _supply(config: Config, embedding: Embedding, judge: Judge) -> None:
    """Build what the cache does not hold yet, without taking time from requests."""
    if judge.has_fast_tier or not embedding.each:
        return
    try:
        encoder = await build_static(default_cache_dir(os.environ))
        if encoder is not None:
            await _lend(judge, encoder, config, embedding)
    except Exception:  # noqa: BLE001  the task's boundary: without it, overload is only worse-informed
        _log.exception("no static encoder")


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _beat(health: Health) -> None:
    while True:
        health.beat()
        await asyncio.sleep(_BEAT_S)
