"""Figures about decisions, from arrays of labels, outcomes and scores; it knows no text and no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

NONE: Final = -1
"""As a label: the prompt belongs to no route. As an outcome: no route admitted it."""

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

_RESAMPLES: Final = 10_000
_SEED: Final = 3
_INTERVAL_PERCENT: Final = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Observations:
    """What was decided about n prompts, with routes as indexes into `routes`."""

    routes: tuple[str, ...]
    default: int
    labels: Ints
    """(n): where each prompt belongs, or NONE."""
    outcomes: Ints
    """(n): the route that a signal chose, or NONE, which goes to the default."""
    scores: Floats
    """(n, routes): NaN where a route has no utterances, or where the model was not asked."""
    thresholds: Floats
    """(routes): those in force; NaN where a route has no utterances."""

    @property
    def scored(self) -> Bools:
        """(n): which prompts the thresholds decided about; the others a keyword, for instance."""
        return np.asarray(~np.isnan(self.scores).all(axis=1))

    @property
    def in_scope(self) -> Bools:
        return np.asarray(self.labels != NONE)

    def right(self, outcomes: Ints | int) -> Bools:
        """(n): whether each prompt would arrive where it belongs.

        What no route admits goes to the default, so these two are one place.
        """
        arrived = np.where(np.equal(outcomes, NONE), self.default, outcomes)
        wanted = np.where(self.in_scope, self.labels, self.default)
        return np.asarray(arrived == wanted)


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of prompts, and the interval that holds the true one in 95 of 100 such samples."""

    share: float
    low: float
    high: float
    count: int
    total: int


def rate(hits: Bools) -> Rate | None:
    """None: of nothing.

    The interval is the percentile bootstrap (Efron 1979). To resample n zeros and ones with
    replacement and take the mean is to draw from Binomial(n, share), so that is what is drawn.
    """
    total = len(hits)
    if not total:
        return None
    count = int(hits.sum())
    draws = np.random.default_rng(_SEED).binomial(total, count / total, _RESAMPLES) / total
    low, high = np.percentile(draws, _INTERVAL_PERCENT)
    return Rate(count / total, float(low), float(high), count, total)


def best(scores: Floats) -> tuple[Ints, Floats]:
    """The best route of each prompt and its score; of two alike the first in the file's order."""
    filled = np.where(np.isnan(scores), -np.inf, scores)
    return filled.argmax(axis=1), filled.max(axis=1)


def top_1(seen: Observations) -> Ints:
    """(n): the outcomes if every threshold were as low as it goes."""
    routes, _ = best(seen.scores)
    return np.where(seen.scored, routes, seen.outcomes)


def outcomes_at(seen: Observations, thresholds: Floats) -> Ints:
    """(n): the outcomes under other thresholds: the best-scoring of the routes that admit."""
    with np.errstate(invalid="ignore"):
        admitted = np.where(seen.scores >= thresholds, seen.scores, np.nan)
    routes, scores = best(admitted)
    return np.where(seen.scored, np.where(np.isinf(scores), NONE, routes), seen.outcomes)


def auroc(seen: Observations) -> float | None:
    """The chance that a prompt of some route has a better best score than one of no route.

    Prompts of the default route are left out: be they admitted or not, they arrive.
    The Mann-Whitney rank statistic with midranks for ties, which is the exact area under the ROC
    curve: Hanley and McNeil, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve", Radiology 143 (1982). None: one of the two kinds is missing.
    """
    _, scores = best(seen.scores)
    inside = scores[seen.scored & seen.in_scope & (seen.labels != seen.default)]
    outside = scores[seen.scored & ~seen.in_scope]
    if not len(inside) or not len(outside):
        return None
    _, inverse, counts = np.unique(
        np.concatenate([inside, outside]), return_inverse=True, return_counts=True
    )
    last_ranks = np.cumsum(counts)
    midranks = (last_ranks - (counts - 1) / 2)[inverse]
    wins = midranks[: len(inside)].sum() - len(inside) * (len(inside) + 1) / 2
    return float(wins / (len(inside) * len(outside)))


def confusion(seen: Observations) -> Ints:
    """(routes + 1, routes + 1): prompts by label and outcome; NONE stands last in both."""
    size = len(seen.routes) + 1
    cells = (seen.labels % size) * size + seen.outcomes % size  # -1 is the last row and column
    return np.bincount(cells, minlength=size * size).reshape(size, size)


@dataclass(frozen=True, slots=True)
class RouteFigures:
    """Of one route, or of no route (the last). None: there is nothing to divide by."""

    name: str
    prompts: int
    precision: float | None
    """Of what ended here, the share that belongs here."""
    recall: float | None
    """Of what belongs here, the share that arrived."""
    f1: float | None


def per_route(seen: Observations, no_route: str) -> tuple[RouteFigures, ...]:
    right = seen.right(seen.outcomes)

    def figures(index: int, name: str) -> RouteFigures:
        here, ended = seen.labels == index, seen.outcomes == index
        precision, recall = _mean(right[ended]), _mean(right[here])
        f1 = None
        if precision is not None and recall is not None:
            both = precision + recall
            f1 = 2 * precision * recall / both if both else 0.0
        return RouteFigures(name, int(here.sum()), precision, recall, f1)

    named = [figures(index, name) for index, name in enumerate(seen.routes)]
    return (*named, figures(NONE, no_route))


def _mean(hits: Bools) -> float | None:
    return float(hits.mean()) if len(hits) else None


@dataclass(frozen=True, slots=True)
class Timing:
    """Of the real encoder, with as many prompts in flight as it embeds at once: nothing queues."""

    p50_ms: float
    p95_ms: float
    decisions_per_s: float
    total_s: float
    workers: int
    """In flight: the workers, or the calls to an embedding service."""


def timing(seconds: Floats, *, total_s: float, workers: int) -> Timing:
    """`seconds`: per decision, from the body's arrival."""
    p50, p95 = np.percentile(seconds, (50, 95)) * 1e3
    return Timing(float(p50), float(p95), len(seconds) / total_s, total_s, workers)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Shares of prompts by their score for one route; each row of shares sums to 1, or is zero."""

    route: str
    edges: tuple[float, ...]
    own: tuple[float, ...]
    """Prompts that belong to the route."""
    others: tuple[float, ...]
    """Prompts of other routes."""
    outside: tuple[float, ...]
    """Prompts of no route."""


def histograms(seen: Observations, *, bins: int = 40) -> tuple[Histogram, ...]:
    """One for each route with scores, all over the same range."""
    scored = [
        index for index in range(len(seen.routes)) if not np.isnan(seen.scores[:, index]).all()
    ]
    if not scored:
        return ()
    low = min(0.0, float(np.nanmin(seen.scores)))
    edges = np.linspace(low, max(1.0, float(np.nanmax(seen.scores))), bins + 1)

    def shares(scores: Floats) -> tuple[float, ...]:
        counts, _ = np.histogram(scores[~np.isnan(scores)], edges)
        return tuple((counts / max(1, counts.sum())).tolist())

    return tuple(
        Histogram(
            seen.routes[index],
            tuple(edges.tolist()),
            shares(seen.scores[seen.labels == index, index]),
            shares(seen.scores[(seen.labels != index) & seen.in_scope, index]),
            shares(seen.scores[~seen.in_scope, index]),
        )
        for index in scored
    )
