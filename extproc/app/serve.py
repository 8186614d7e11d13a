"""Wires the sidecar: encoder, plan, gate, gRPC server, admin listener; runs it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from extproc.app.board import Board
from extproc.app.embedding import Embedding, Learned, running_embedding, worker_count
from extproc.app.judge import Encodes, Judge, build_static, fit_fast_tier, open_static
from extproc.app.plan import compile_plan, needs_encoder, semantic_index
from extproc.config import Config
from extproc.core.cache import DecisionCache, routes_version
from extproc.core.circuit import GateBank
from extproc.core.exchange import Plan
from extproc.core.routing import RouteRule
from extproc.core.wire_names import EXPLICIT_ROUTE, RULE
from extproc.embedding.model import default_cache_dir
from extproc.embedding.pool import RestartCause, SkipCause
from extproc.metrics import Metrics
from extproc.serving.accounts import AccessLog, Accounts
from extproc.serving.admin import AdminServer, Health
from extproc.serving.envoy_stats import EnvoyStats
from extproc.serving.events import Feed
from extproc.serving.foreign import ForeignProcessor
from extproc.serving.gate import Gate
from extproc.serving.reconcile import Reconciler
from extproc.serving.server import ForeignServer, SidecarServer
from extproc.serving.servicer import Decider, Processor

if TYPE_CHECKING:
    from extproc.serving.traces import Traces

_log = logging.getLogger(__name__)

LEDGER_SUFFIX = ".ledger"
"""Beside the socket: what this run has accounted for, for the next one."""
DRAIN_S = 10.0
"""Streams in flight get this long; a decision takes milliseconds, so they are few."""
_BEAT_S = 0.5
_GC_THRESHOLD = 10_000
_RECORD_DELAY_S = 2.0
"""How much later than an attempt's limit its record may come before its trial counts as lost."""


class TracingMissingError(Exception):
    """The packages that spans need are not installed."""


async def serve(config: Config, *, progress: Callable[[str], None]) -> None:
    """The sidecar until SIGTERM or SIGINT. Raise ModelError, OSError, SocketBusyError or
    TracingMissingError at start.
    """
    serving = asyncio.create_task(_serve_for_ever(config, progress))
    asked = asyncio.Event()

    def stop() -> None:
        if (
            not asked.is_set()
        ):  # once: what a start or a drain has left to do is not to be cancelled
            asked.set()
            serving.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        if not asked.is_set():
            raise


async def _serve_for_ever(config: Config, progress: Callable[[str], None]) -> None:
    async with running_sidecar(config, progress=progress):
        progress("sidecar ready")
        await asyncio.Event().wait()


@asynccontextmanager
async def running_sidecar(
    config: Config, *, progress: Callable[[str], None]
) -> AsyncIterator[CollectorRegistry]:
    """Everything that `serve` runs, up and warm inside the block, drained behind it."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # half the lines of a scrape, and nobody's question
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    names = {each.id: each.name for each in config.upstreams.values()}
    metrics = Metrics(
        registry,
        fallback_metric=config.fallback.metric_prefix,
        routes=[EXPLICIT_ROUTE, *(route.name for route in config.routes)],
        upstream_names=[*names.values(), RULE],
    )
    metrics.limits(
        deadline_s=config.router.deadline_s,
        queue=config.router.queue,
        workers=worker_count(config),
    )
    metrics.may_happen(restarts=RestartCause, skips=SkipCause)
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
        async with running_embedding(
            config, metrics, progress=progress, required=False
        ) as embedding:
            health.condition = embedding.condition
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
            judge = _judge(config, embedding, plan, metrics)
            changed = _follow(config, embedding, judge)
            encoder = await fast
            if encoder is not None:
                await _lend(judge, encoder, embedding)
            decider = Decider(
                plan=plan,
                embed=judge,
                metrics=metrics,
                deadline_s=config.router.deadline_s,
                tell=tracing.tell if tracing else None,
            )
            accounts = Accounts(metrics=metrics, observer=gate, upstream_names=names, feed=feed)
            serving = (
                _serving_foreign(config, decider, gate, metrics, accounts)
                if config.foreign
                else _serving_ours(
                    config, decider, gate, metrics, accounts, on_read=board.envoy_read
                )
            )
            async with _flushing(tracing), serving:
                _spare_the_collector()
                board.serves(
                    gate=gate,
                    crew=embedding.crew,
                    plan=plan,
                    embed=judge.afresh,
                    encoder=embedding.condition,
                )
                health.ready = True
                # The cores are free now.
                late = asyncio.create_task(
                    _supply(config, embedding, judge, changed, encoder=encoder)
                )
                try:
                    yield registry
                finally:
                    health.ready = False
                    await _cancel(late)
    finally:
        await _cancel(beat)
        await _cancel(telling)
        await _cancel(fast)
        await asyncio.to_thread(admin.stop)


@asynccontextmanager
async def _serving_ours(
    config: Config,
    decider: Decider,
    gate: Gate,
    metrics: Metrics,
    accounts: Accounts,
    *,
    on_read: Callable[[EnvoyStats | None], None],
) -> AsyncIterator[None]:
    """On the socket, for the Envoy of `pointsman render`."""
    reconciler = Reconciler(
        path=config.extproc_socket + LEDGER_SUFFIX,
        admin_url=config.admin.url,
        metrics=metrics,
        on_read=on_read,
    )
    server = SidecarServer(
        socket_path=config.extproc_socket,
        processor=Processor(
            decider=decider, gate=gate, metrics=metrics, passed_on=reconciler.passed_on
        ),
        access_log=AccessLog(accounts, metrics=metrics, book=reconciler),
        max_body_bytes=config.server.max_body_bytes,
    )
    await server.start()
    keepers = _keep_keys(config, metrics)
    reconciler.start()
    try:
        yield
    finally:
        for keeper in keepers:
            await _cancel(keeper)
        await server.drain(DRAIN_S)
        await reconciler.aclose()


@asynccontextmanager
async def _serving_foreign(
    config: Config,
    decider: Decider,
    gate: Gate,
    metrics: Metrics,
    accounts: Accounts,
) -> AsyncIterator[None]:
    """On TCP, for an Envoy that is not ours: it keeps no accounts for us, and we read none of it."""
    assert config.foreign is not None
    has_rule = any(chain.rule for chain in config.chains())
    processor = ForeignProcessor(
        decider=decider,
        gate=gate,
        metrics=metrics,
        accounts=accounts,
        upstream_names={each.id: each.name for each in config.upstreams.values()},
        rule_text=config.fallback.rule_response if has_rule else None,
    )
    server = ForeignServer(
        config.foreign, processor=processor, max_body_bytes=config.server.max_body_bytes
    )
    await server.start()
    try:
        yield
    finally:
        await server.drain(DRAIN_S)


def _keep_keys(config: Config, metrics: Metrics) -> list[asyncio.Task[None]]:
    if config.server.auth is None and not any(
        each.api_key_file for each in config.upstreams.values()
    ):
        return []
    # Envoy's typed messages come along: half of the work of a start, and 23 MB.
    from extproc.app.envoy_files import KeyKeeper, key_files  # noqa: PLC0415

    def told(ok: bool) -> None:  # noqa: FBT001  a callback
        metrics.keys_reloaded(ok=ok)

    keepers = [
        KeyKeeper(file, told) if file.is_clients else KeyKeeper(file) for file in key_files(config)
    ]
    return [asyncio.create_task(keeper.run()) for keeper in keepers]


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


@asynccontextmanager
async def _flushing(tracing: Traces | None) -> AsyncIterator[None]:
    """Whatever ends the block, its spans are sent."""
    try:
        yield
    finally:
        if tracing is not None:
            await tracing.aclose()


# --- the static encoder: there from the start, or once it is built ------------------------------------


async def _open_static(config: Config) -> Encodes | None:
    if not needs_encoder(config):
        return None
    return await asyncio.to_thread(open_static, default_cache_dir(os.environ))


def _judge(config: Config, embedding: Embedding, plan: Plan, metrics: Metrics) -> Judge:
    learned = embedding.learned
    return Judge(
        embedding.embed,
        plan.index,
        metrics,
        cascade=config.router.cascade,
        cache=_cache(config, plan.index.rules, learned.digest) if learned else None,
    )


def _follow(config: Config, embedding: Embedding, judge: Judge) -> asyncio.Event:
    """Have the judge know what a service says of the utterances later on; set then."""
    changed = asyncio.Event()

    def learned(news: Learned) -> None:
        index = semantic_index(config, news.vectors)
        judge.know(index, _cache(config, index.rules, news.digest))
        changed.set()

    embedding.follow(learned)
    return changed


def _cache(config: Config, rules: Sequence[RouteRule], digest: str) -> DecisionCache | None:
    """`rules`: those that are scored, with their thresholds; `digest`: of the model that scores them."""
    capacity = config.router.cache
    return DecisionCache(capacity, routes_version(rules, digest)) if capacity else None


async def _lend(judge: Judge, encoder: Encodes, embedding: Embedding) -> None:
    judge.use(await asyncio.to_thread(fit_fast_tier, encoder, judge.rules, embedding.each))


async def _supply(
    config: Config,
    embedding: Embedding,
    judge: Judge,
    changed: asyncio.Event,
    *,
    encoder: Encodes | None,
) -> None:
    """The static encoder where the cache does not hold it yet, built without taking time from requests;
    and its fit, whenever the utterances' vectors have `changed`.
    """
    if not needs_encoder(config):
        return
    try:
        if encoder is None:
            encoder = await build_static(default_cache_dir(os.environ))
            changed.set()
        while encoder is not None:
            await changed.wait()
            changed.clear()
            await _lend(judge, encoder, embedding)
    except Exception:  # noqa: BLE001  the task's boundary: without it, overload is only worse-informed
        _log.exception("no static encoder")


def _spare_the_collector() -> None:
    """What start-up made lives as long as we do; each walk over it held up the loop for 20 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _beat(health: Health) -> None:
    while True:
        health.beat()
        await asyncio.sleep(_BEAT_S)
