"""The encoder that the configuration names, running: workers here, or a service elsewhere.

It decides nothing and serves nobody by itself.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from extproc.app.advice import on_thresholds
from extproc.app.judge import EmbedFully
from extproc.app.plan import needs_encoder
from extproc.config import Config, Encoder, Route, Unfit, env_secret
from extproc.core.errors import RouteReason
from extproc.core.exchange import Embedded, NotEmbedded
from extproc.core.fast import Utterances
from extproc.core.routing import Vectors
from extproc.embedding.batch import Budget
from extproc.embedding.cache import in_use
from extproc.embedding.cores import default_workers
from extproc.embedding.model import ModelError, default_cache_dir, ensure_model
from extproc.embedding.pool import Crew, Pool, PoolEvents
from extproc.embedding.remote import Limits, Remote, RemoteEvents
from extproc.embedding.service import Failure, Fault, Service
from extproc.embedding.waiting import NotEmbedded as NotInLine
from extproc.embedding.waiting import Outcome

_PATIENCE_S: Final = 10.0
"""How long a sidecar tries before it serves without its embedding service."""
_START_LIMIT_S: Final = 60.0
"""The same if the service answers, and has more utterances to embed than that takes."""
_NO_LIMIT_S: Final = 24 * 3600.0
_TERMINAL_DEADLINE_S: Final = 10.0
"""Of a call, for a person: judgement counts there, not the deadline of a request."""

_MENDS: Final = {
    Fault.REFUSED: "check url, model and api_key_env, and that the service cuts texts that are too long",
    Fault.BAD_SCHEMA: "url must be an OpenAI-compatible embeddings endpoint, and model an embedding model",
    Fault.RATE_LIMITED: "lower max_concurrency",
}
_MEND: Final = "start it, or correct url"


class EmbeddingEvents(PoolEvents, RemoteEvents, Protocol):
    """What either encoder reports."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The routes' utterances as one model sees them."""

    each: Utterances
    digest: str
    """Vectors of one digest are comparable with each other only."""

    @property
    def vectors(self) -> dict[str, Vectors]:
        """By route; a long utterance has two vectors, and both stand for it."""
        return {route: np.concatenate(own) for route, own in self.each.items()}


class Embedding:
    """What the router needs of the model. Mutable: `learned`, which only a service's changes, from None
    or to what another model says; and who is told then.
    """

    def __init__(
        self,
        embed: EmbedFully,
        *,
        parallel: int,
        learned: Learned | None = None,
        condition: Callable[[], str] = lambda: "",
        crew: Callable[[], Crew] = lambda: Crew(0, 0, 0, 0),
    ) -> None:
        """`parallel`: how many prompts it embeds without making one wait. `condition`: why prompts are
        not sent to it, or nothing.
        """
        self.embed = embed
        self.parallel = parallel
        self.learned = learned
        self.condition = condition
        self.crew = crew
        self._followers: list[Callable[[Learned], None]] = []

    @property
    def utterances(self) -> dict[str, Vectors] | None:
        return self.learned.vectors if self.learned else None

    @property
    def each(self) -> Utterances | None:
        return self.learned.each if self.learned else None

    def follow(self, follower: Callable[[Learned], None]) -> None:
        """Have it called with what is learned from now on, before any prompt is embedded with that."""
        self._followers.append(follower)

    def learn(self, learned: Learned) -> None:
        self.learned = learned
        for follower in self._followers:
            follower(learned)


def worker_count(config: Config) -> int:
    """0 where a service embeds, or nothing is to be embedded."""
    if config.router.encoder.url is not None or not needs_encoder(config):
        return 0
    return config.router.workers or default_workers()


@asynccontextmanager
async def running_embedding(
    config: Config,
    events: EmbeddingEvents,
    *,
    progress: Callable[[str], None],
    required: bool = True,
) -> AsyncIterator[Embedding]:
    """The encoder, warm, and the routes' utterances; neither where no route has utterances.

    `required` False: a service that cannot be reached is no error, `learned` is None until it can.
    Raise ModelError.
    """
    if note := on_thresholds(config):
        progress(note)
    routes = [route for route in config.routes if route.utterances]
    if not routes:
        yield Embedding(_no_model, parallel=1, learned=Learned({}, ""))
    elif config.router.encoder.url is None:
        async with _workers(config, routes, events, progress) as embedding:
            yield embedding
    else:
        async with _service(config, routes, events, progress, required=required) as embedding:
            yield embedding


@asynccontextmanager
async def _workers(
    config: Config,
    routes: Sequence[Route],
    events: PoolEvents,
    progress: Callable[[str], None],
) -> AsyncIterator[Embedding]:
    files = ensure_model(
        config.router.encoder.path, cache_dir=default_cache_dir(os.environ), progress=progress
    )
    workers = worker_count(config)
    pool = Pool(files, workers=workers, queue=config.router.queue, events=events)
    with in_use(files.onnx):  # by workers yet to be started, too
        await pool.start()
        try:
            texts = [text for route in routes for text in route.utterances]
            each = _by_route(routes, await pool.embed_many(texts))
            progress(
                f"{workers} worker(s) warm, {len(texts)} utterances of {len(routes)} routes embedded"
            )

            async def embed(text: str, deadline: float) -> Embedded | NotEmbedded:
                return _told(await pool.embed(text, deadline=deadline))

            yield Embedding(
                embed, parallel=workers, learned=Learned(each, files.digest), crew=pool.crew
            )
        finally:
            await pool.aclose()


@asynccontextmanager
async def _service(
    config: Config,
    routes: Sequence[Route],
    events: RemoteEvents,
    progress: Callable[[str], None],
    *,
    required: bool,
) -> AsyncIterator[Embedding]:
    asked = config.router.encoder
    assert asked.url is not None
    service = Service(
        asked.url, model=asked.model, key=_key(asked, os.environ), dimensions=asked.dimensions
    )
    texts = [text for route in routes for text in route.utterances]

    async def embed(text: str, deadline: float) -> Embedded | NotEmbedded:
        return _told(await remote.embed(text, deadline=deadline))

    def learned(vectors: Sequence[Vectors], generation: int) -> None:
        digest = f"{asked.url} {asked.model} {generation}"
        embedding.learn(Learned(_by_route(routes, vectors), digest))
        progress(f"{len(texts)} utterances of {len(routes)} routes embedded by {asked.url}")

    remote = Remote(
        service,
        texts,
        limits=Limits(
            deadline_s=_TERMINAL_DEADLINE_S if required else asked.deadline_s,
            budget=Budget(tokens=asked.batch_tokens, inputs=asked.max_batch),
            concurrency=asked.max_concurrency,
            queue=config.router.queue,
        ),
        events=events,
        learned=learned,
        progress=progress,
    )
    embedding = Embedding(embed, parallel=asked.max_concurrency, condition=lambda: remote.condition)
    service.start()
    progress(f"asking {asked.url} for the vectors of {len(texts)} utterances")
    try:
        failure = await remote.start(
            patience_s=0.0 if required else _PATIENCE_S,
            limit_s=_NO_LIMIT_S if required else _START_LIMIT_S,
        )
        if failure is not None and required:
            raise ModelError(_complaint(asked, failure))
        if failure is not None:
            progress(
                f"{_complaint(asked, failure)}; until it answers, the static encoder decides, or "
                "else the default route"
            )
        yield embedding
    finally:
        await remote.aclose()
        await service.aclose()


def _key(encoder: Encoder, environ: Mapping[str, str]) -> str | None:
    """The key itself, read late: the configuration holds its variable's name only."""
    if encoder.api_key_env is None:
        return None
    where = "[router.encoder] api_key_env"
    try:
        key = env_secret(encoder.api_key_env, environ)
    except Unfit as unfit:
        raise ModelError(f"{where}: {unfit.problem}; {unfit.mend}") from None
    if key is None:
        variable = encoder.api_key_env
        raise ModelError(
            f"{where}: the environment variable {variable} is not set; export {variable}"
        )
    return key


def _complaint(encoder: Encoder, failure: Failure) -> str:
    """`failure` is about utterances, so that the service's own words may be shown."""
    detail = f" ({failure.detail})" if failure.detail else ""
    mend = _MENDS.get(failure.fault, _MEND)
    return f"[router.encoder] url = {encoder.url}: {failure.fault}: {failure.words}{detail}; {mend}"


def _by_route(routes: Iterable[Route], vectors: Iterable[Vectors]) -> dict[str, list[Vectors]]:
    found = iter(vectors)
    return {route.name: [next(found) for _ in route.utterances] for route in routes}


def _told(outcome: Outcome) -> Embedded | NotEmbedded:
    if isinstance(outcome, NotInLine):
        return NotEmbedded(outcome.reason)
    return Embedded(outcome.vectors, outcome.wait_s, outcome.embed_s)


async def _no_model(_text: str, _deadline: float) -> Embedded | NotEmbedded:
    return NotEmbedded(RouteReason.DEGRADED_WORKER)
