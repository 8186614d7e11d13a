"""Who scores a prompt: the decision cache, the full encoder, or the static one when that cannot in time.

It decides nothing: scores and reasons go to the exchange.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from extproc.core.cache import DecisionCache
from extproc.core.exchange import Embedded, NotEmbedded, Scored
from extproc.core.fast import FastIndex, Utterances
from extproc.core.routing import RouteRule, RouteScore, SemanticIndex, Vectors
from extproc.embedding.cache import remove_older
from extproc.embedding.model import ModelError
from extproc.embedding.static import StaticEncoder, find_static
from extproc.embedding.text import bound
from extproc.metrics import Metrics

_FULL_SHARE: Final = 0.9
"""Of the time for a decision, what the workers get: the static encoder answers in the rest of it."""

_log = logging.getLogger(__name__)


class Encodes(Protocol):
    def encode_all(self, texts: Sequence[str]) -> list[Vectors]:
        """[k, dimension] of each, in a fraction of a millisecond."""
        ...


EmbedFully = Callable[[str, float], Awaitable[Embedded | NotEmbedded]]
"""Text and absolute deadline (loop.time() seconds) -> the full encoder's vectors; never late."""


class FastTier:
    """The static encoder with its index. Mutable: `_asked`, the prompts of this turn of the loop.

    A prompt is scored in the next turn, with all others that came in this one: none waits for a timer,
    and the more there are, the less each costs.
    """

    def __init__(self, encoder: Encodes, index: FastIndex) -> None:
        self._encoder = encoder
        self._index = index
        self._asked: list[tuple[str, asyncio.Future[tuple[RouteScore, ...]]]] = []

    async def scores(self, text: str) -> tuple[RouteScore, ...]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[RouteScore, ...]] = loop.create_future()
        self._asked.append((text, answer))
        if len(self._asked) == 1:
            loop.call_soon(self._answer)
        return await answer

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        waiting = [(text, answer) for text, answer in asked if not answer.done()]
        if not waiting:
            return
        try:
            found = self._index.scores_all(self._encoder.encode_all([text for text, _ in waiting]))
        except Exception as error:  # noqa: BLE001  each caller's own boundary takes it
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for (_, answer), scores in zip(waiting, found, strict=True):
            answer.set_result(scores)

    def is_decisive(self, scores: tuple[RouteScore, ...]) -> bool:
        return self._index.is_decisive(scores)


class Judge:
    """Mutable: `_fast`, None until the static encoder is there; the index and the cache."""

    def __init__(
        self,
        embed: EmbedFully,
        index: SemanticIndex,
        metrics: Metrics,
        *,
        cascade: bool = False,
        cache: DecisionCache | None = None,
    ) -> None:
        self._embed = embed
        self._index = index
        self._metrics = metrics
        self._cascade = cascade
        self._cache = cache
        self._fast: FastTier | None = None

    @property
    def rules(self) -> Sequence[RouteRule]:
        """Those that are scored, with the thresholds that they are scored by."""
        return self._index.rules

    def use(self, fast: FastTier) -> None:
        self._fast = fast
        self._metrics.static_encoder_ready()

    def know(self, index: SemanticIndex, cache: DecisionCache | None) -> None:
        """The utterances' vectors are known only now, or others than before."""
        self._index = index
        self._cache = cache

    async def __call__(self, text: str, deadline: float) -> Scored | NotEmbedded:
        """Past `deadline` (loop.time() seconds) by no more than the static encoder takes."""
        text = bound(text)
        cache = self._cache
        if cache is None:
            return await self._score(text, deadline)
        key = cache.key(text)
        known = cache.get(key)
        self._metrics.cache_looked_up(hit=known is not None)
        if known is not None:
            return Scored(known)
        # Should `know` come meanwhile, what is found belongs to the old cache.
        return await self._score(text, deadline, keep=lambda scores: cache.put(key, scores))

    async def afresh(self, text: str, deadline: float) -> Scored | NotEmbedded:
        """The same, neither looked up nor remembered: for prompts that somebody only tries."""
        return await self._score(bound(text), deadline)

    async def _score(
        self,
        text: str,
        deadline: float,
        *,
        keep: Callable[[tuple[RouteScore, ...]], None] = lambda _: None,
    ) -> Scored | NotEmbedded:
        """`keep` is told what the full encoder says."""
        if self._cascade and self._fast is not None and self._index.is_known:
            scores = await self._fast.scores(text)
            decisive = self._fast.is_decisive(scores)
            self._metrics.cascaded(static=decisive)
            if decisive:
                return Scored(scores)
        now = asyncio.get_running_loop().time()
        outcome = await self._embed(text, now + _FULL_SHARE * (deadline - now))
        if isinstance(outcome, NotEmbedded):
            if self._fast is None:
                return outcome
            return Scored(await self._fast.scores(text), degraded=True)
        scores = self._index.scores(outcome.vectors)
        keep(scores)
        return Scored(scores, wait_s=outcome.wait_s, embed_s=outcome.embed_s)


def open_static(cache_dir: Path) -> StaticEncoder | None:
    """The static encoder, if its table is there. Blocks for 0.3 s; a useless table is logged."""
    try:
        found = find_static(cache_dir)
        if found is None:
            return None
        remove_older(found.table, _log.info)  # one that is mapped stays, for who has mapped it
        return StaticEncoder(found)
    except ModelError as error:
        _log.warning("no static encoder: %s", error)
        return None


def fit_fast_tier(
    encoder: Encodes, rules: Sequence[RouteRule], full: Utterances | None
) -> FastTier:
    """`full`: the utterances of `rules` by the full encoder. Blocks: a millisecond an utterance.

    None: not known yet. Then the static encoder stands for itself, with the thresholds that suit the
    model that it was distilled from: the configured ones are of the full encoder's scale.
    """
    fast = {rule.name: encoder.encode_all(rule.utterances) for rule in rules if rule.utterances}
    if full is None:
        rules, full = [replace(rule, threshold=None) for rule in rules], fast
    return FastTier(encoder, FastIndex(rules, full=full, fast=fast))


async def build_static(cache_dir: Path) -> StaticEncoder | None:
    """Have a child of the lowest priority build the table; its failure is logged."""
    _log.info("building the static encoder in the background")
    said, status = await _run_builder(cache_dir)
    encoder = await asyncio.to_thread(open_static, cache_dir)
    last = said.strip().rpartition("\n")[2]
    if encoder is None:
        _log.warning("no static encoder: %s", last or f"its builder ended with {status}")
    else:
        _log.info("%s", last)
    return encoder


async def _run_builder(cache_dir: Path) -> tuple[str, int]:
    """What the child said, and its status; it ends with us."""
    command = [sys.executable, "-P", "-m", "extproc.embedding.distill", str(cache_dir)]
    # More BLAS threads than cores to spare took eight times the processor's time.
    environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    child = await asyncio.to_thread(
        subprocess.Popen,
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        said, _ = await asyncio.to_thread(child.communicate)
    finally:
        child.kill()
    return said, child.returncode
