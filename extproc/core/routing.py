"""What routes ask for, what a client may name, and meaning -> RouteDecision; vectors come from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from extproc.core.errors import Content, RouteReason

Vectors: TypeAlias = npt.NDArray[np.float32]
"""L2-normalised embeddings, shape (count, dimension)."""

ENOUGH_UTTERANCES: Final = 10
THRESHOLD: Final = 0.32
"""Measured on labelled prompts in English and Chinese for routes of 10 utterances or more."""
THRESHOLD_FEW: Final = 0.28
"""Both are floors: see `calibrated`."""

_STRANGERS: Final = 20
"""Fewer scores of other routes' utterances than that say nothing of strangers."""
_SPREAD: Final = 1.5
_SAMPLE: Final = 1_024
"""Utterances that are looked at, evenly drawn: beyond, only the time to start would grow."""


@dataclass(frozen=True, slots=True)
class RouteRule:
    """One route's signals; any of them admits a prompt."""

    name: str
    utterances: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    threshold: float | None = None
    patterns: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    """Name and value of request headers."""
    has: tuple[Content, ...] = ()
    min_chars: int | None = None
    max_chars: int | None = None
    priority: int = 0
    """Of the rules, that is, of all but the utterances."""

    @property
    def effective_threshold(self) -> float:
        if self.threshold is not None:
            return self.threshold
        return THRESHOLD if len(self.utterances) >= ENOUGH_UTTERANCES else THRESHOLD_FEW


@dataclass(frozen=True, slots=True)
class RouteScore:
    """How well a prompt fits one route: cosine blend, at most 1."""

    route: str
    score: float
    threshold: float

    @property
    def admitted(self) -> bool:
        return self.score >= self.threshold


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Where a prompt goes and why; `scores` is empty when the semantic signal was not asked."""

    route: str
    reason: RouteReason
    scores: tuple[RouteScore, ...] = ()
    matched: str | None = None
    """By which a rule decided: the word, expression, header, content or length."""


class SemanticIndex:
    """The routes' utterances as vectors.

    Score of a route = half its nearest utterance's cosine plus half the cosine to the mean of its
    utterances; of several query vectors (first and last paragraph) the best counts. This blend was
    ahead of nearest, centroid, mean, sum and top-3 on every labelled set measured.
    """

    def __init__(self, rules: Sequence[RouteRule], vectors: Mapping[str, Vectors] | None) -> None:
        """`vectors[route]` holds that route's utterances, shape (count, dimension). None: they are not
        known yet, and there are no scores.
        """
        self.rules = tuple(rule for rule in rules if rule.utterances)
        """Those that are scored."""
        self.is_known = vectors is not None
        blocks = [vectors[rule.name] for rule in self.rules] if vectors is not None else []
        self._starts = np.cumsum([0] + [len(block) for block in blocks[:-1]])
        self._routes = len(blocks)
        if blocks:
            centroids = np.stack([_normalised(block.mean(axis=0)) for block in blocks])
            self._matrix = np.ascontiguousarray(np.concatenate([*blocks, centroids]), np.float32)

    @property
    def is_empty(self) -> bool:
        """No route has utterances: there is nothing to ask an encoder for."""
        return not self.rules

    def scores(self, query: Vectors) -> tuple[RouteScore, ...]:
        """One score a route with utterances, in the file's order. `query`: (k, dimension)."""
        if not self._routes:
            return ()
        return self._told(self.blend(query).max(axis=1).tolist())

    def scores_all(self, queries: Sequence[Vectors]) -> list[tuple[RouteScore, ...]]:
        """The scores of each query; many together cost less than one by one."""
        if not self._routes:
            return [()] * len(queries)
        starts = np.cumsum([0] + [len(query) for query in queries[:-1]])
        best = np.maximum.reduceat(self.blend(np.concatenate(queries)), starts, axis=1)
        return [self._told(scores) for scores in best.T.tolist()]

    def _told(self, scores: Sequence[float]) -> tuple[RouteScore, ...]:
        return tuple(
            RouteScore(rule.name, score, rule.effective_threshold)
            for rule, score in zip(self.rules, scores, strict=True)
        )

    def blend(self, queries: Vectors) -> Vectors:
        """The score of each route with utterances for each query: (routes, queries)."""
        cosines = self._matrix @ queries.T
        nearest = np.maximum.reduceat(cosines[: -self._routes], self._starts, axis=0)
        return np.asarray((nearest + cosines[-self._routes :]) * np.float32(0.5), np.float32)


def calibrated(rules: Sequence[RouteRule], vectors: Mapping[str, Vectors]) -> list[RouteRule]:
    """The rules with thresholds: those without one get theirs from all routes' utterances.

    How an utterance scores on a route that is not its own shows how a stranger close to the routes
    would: thresholds lie one and a half deviations above the mean of these scores, and never under
    the floor, which is right for routes that differ in kind. With the default model, balanced accuracy
    rose from 0.55 to 0.74 where the routes are topics of one domain (the best threshold gives 0.75)
    and nowhere fell; models whose cosines lie elsewhere get thresholds on their own scale. Quantiles
    of what utterances score on their *own* route, left out, are worse than the floor alone.
    """
    scored = [rule for rule in rules if rule.utterances]
    own = np.repeat(np.arange(len(scored)), [len(vectors[rule.name]) for rule in scored])
    if len(own) * (len(scored) - 1) < _STRANGERS:
        return list(rules)
    step = -(-len(own) // _SAMPLE)
    queries = np.concatenate([vectors[rule.name] for rule in scored])[::step]
    scores = SemanticIndex(scored, vectors).blend(queries)
    strangers = scores[np.arange(len(scored))[:, None] != own[None, ::step]]
    least = min(1.0, float(strangers.mean() + _SPREAD * strangers.std()))
    return [
        rule
        if rule.threshold is not None or not rule.utterances
        else replace(rule, threshold=max(rule.effective_threshold, round(least, 3)))
        for rule in rules
    ]


def _normalised(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    norm = float(np.linalg.norm(vector))
    return vector if norm == 0.0 else np.asarray(vector / norm, np.float32)


def decide_by_scores(scores: tuple[RouteScore, ...], *, default: str) -> RouteDecision:
    """The best-scoring route of those above their own thresholds, else the default."""
    admitted = [score for score in scores if score.admitted]
    if not admitted:
        return RouteDecision(default, RouteReason.DEFAULT, scores)
    best = max(admitted, key=lambda score: score.score)
    return RouteDecision(best.route, RouteReason.SEMANTIC, scores)


@dataclass(frozen=True, slots=True)
class Auto:
    """The router decides."""


@dataclass(frozen=True, slots=True)
class NamedUpstream:
    """The client named an upstream by id, name or model."""

    upstream: str


@dataclass(frozen=True, slots=True)
class NamedRoute:
    """The client named a route."""

    route: str


class ModelDirectory:
    """What a client may write in `model`; the order of precedence is that of the arguments."""

    def __init__(
        self,
        *,
        aliases: Sequence[str],
        upstreams: Mapping[str, Sequence[str]],
        routes: Sequence[str],
    ) -> None:
        """`upstreams[id]`: the further names (name, model) by which a client may ask for it."""
        targets: dict[str, Auto | NamedUpstream | NamedRoute] = {alias: Auto() for alias in aliases}
        for upstream in upstreams:
            targets.setdefault(upstream, NamedUpstream(upstream))
        for upstream, names in upstreams.items():
            for name in names:
                targets.setdefault(name, NamedUpstream(upstream))
        for route in routes:
            targets.setdefault(route, NamedRoute(route))
        self._targets = targets

    def find(self, model: str) -> Auto | NamedUpstream | NamedRoute | None:
        return self._targets.get(model)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._targets)
