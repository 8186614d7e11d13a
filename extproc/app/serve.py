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

import numpy as np
from prometheus_client import CollectorRegistry, disable_created_metrics

from extproc.config import RULE, Config, Route, UnknownModel, route_chain, upstream_chain
from extproc.core.circuit import GateBank
from extproc.core.errors import RouteReason
from extproc.core.exchange import ChainPlan, Embedded, NotEmbedded, Plan
from extproc.core.routing import (
    KeywordRules,
    ModelDirectory,
    RouteRule,
    SemanticIndex,
    Vectors,
)
from extproc.core.wire_names import EXPLICIT_ROUTE
from extproc.embedding.cores import default_workers
from extproc.embedding.model import default_cache_dir, ensure_model
from extproc.embedding.pool import NotEmbedded as PoolNotEmbedded
from extproc.embedding.pool import Pool, PoolEvents
from extproc.metrics import Metrics
from extproc.serving.accounts import AccessLog
from extproc.serving.admin import AdminServer, Health
from extproc.serving.gate import Gate
from extproc.serving.server import SidecarServer
from extproc.serving.servicer import Embed, Processor

_log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Streams in flight get this long; a decision takes milliseconds, so they are few."""
_BEAT_S = 0.5
_RECORD_DELAY_S = 2.0
"""How much later than an attempt's limit its record may come before its trial counts as lost."""


async def serve(config: Config, *, progress: Callable[[str], None]) -> None:
    """The sidecar until SIGTERM or SIGINT. Raise ModelError, OSError or SocketBusyError at start."""
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
    admin = AdminServer(
        host=config.metrics.host, port=config.metrics.port, registry=registry, health=health
    )
    admin.start()  # first, so that probes are answered while the model warms up
    beat = asyncio.create_task(_beat(health))
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
            server = SidecarServer(
                socket_path=config.extproc_socket,
                processor=Processor(
                    plan=compile_plan(config, embedding.utterances),
                    embed=embedding.embed,
                    gate=gate,
                    metrics=metrics,
                    deadline_s=config.router.deadline_s,
                ),
                access_log=AccessLog(metrics=metrics, observer=gate, upstream_names=names),
                max_body_bytes=config.server.max_body_bytes,
            )
            await server.start()
            health.ready = True
            try:
                yield registry
            finally:
                health.ready = False
                await server.drain(DRAIN_S)
    finally:
        beat.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beat
        await asyncio.to_thread(admin.stop)


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
        keywords=KeywordRules(rules),
        index=SemanticIndex(rules, vectors),
        default_route=config.router.default,
        unknown_model_takes_default=config.router.unknown_model is UnknownModel.DEFAULT,
        route_chains={route.name: chains[route_chain(route.name)] for route in config.routes},
        upstream_chains={each: chains[upstream_chain(each)] for each in config.upstreams},
    )


def _rule(route: Route) -> RouteRule:
    return RouteRule(route.name, route.utterances, route.keywords, route.threshold)


@dataclass(frozen=True, slots=True)
class Embedding:
    """What the router needs of the model: vectors for prompts, and those of the utterances."""

    embed: Embed
    utterances: Mapping[str, Vectors]


@asynccontextmanager
async def running_embedding(
    config: Config, events: PoolEvents, *, progress: Callable[[str], None]
) -> AsyncIterator[Embedding]:
    """The workers, warm, and the routes' utterances; no worker where no route has utterances."""
    routes = [route for route in config.routes if route.utterances]
    if not routes:
        yield Embedding(_no_model, {})
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
        # A long utterance has two vectors; both stand for it.
        utterances = {
            route.name: np.concatenate([next(vectors) for _ in route.utterances])
            for route in routes
        }
        progress(
            f"{workers} worker(s) warm, {len(texts)} utterances of {len(routes)} routes embedded"
        )

        async def embed(text: str, deadline: float) -> Embedded | NotEmbedded:
            result = await pool.embed(text, deadline=deadline)
            if isinstance(result, PoolNotEmbedded):
                return NotEmbedded(result.reason)
            return Embedded(result.vectors)

        yield Embedding(embed, utterances)
    finally:
        await pool.aclose()


async def _no_model(_text: str, _deadline: float) -> Embedded | NotEmbedded:
    return NotEmbedded(RouteReason.DEGRADED_WORKER)


async def _beat(health: Health) -> None:
    while True:
        health.beat()
        await asyncio.sleep(_BEAT_S)
