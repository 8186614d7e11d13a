"""Thresholds fitted to labelled prompts; it knows scores and labels, and no text, file or model.

The objective is the mean of two shares: in-scope prompts that arrive at their route, and prompts of
no route that arrive at the default. It is balanced accuracy, or Youden's J (Cancer 3, 1950) as
(J + 1) / 2, with one thing harder: an in-scope prompt must be admitted by the *right* route. Both kinds
of mistake weigh alike whatever the number of prompts of each kind.

Which threshold is best is found exactly: an objective that counts prompts changes only at a score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from extproc.evaluation.metrics import (
    NONE,
    Bools,
    Floats,
    Ints,
    Observations,
    best,
    outcomes_at,
)

FOLDS: Final = 5
_SEED: Final = 3
_ROUNDS: Final = 20
"""Thresholds are fitted one after the other until none moves; four rounds are common."""
_TIE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Fit:
    """Thresholds by route, and what they do to the prompts they were fitted to."""

    thresholds: dict[str, float]
    in_scope: float
    """Share of in-scope prompts that arrive at their route."""
    out_of_scope: float
    """Share of prompts of no route that arrive at the default."""
    held_out: float | None
    """The objective on prompts that the thresholds had not seen, over five folds. None: too few."""

    @property
    def balanced(self) -> float:
        return (self.in_scope + self.out_of_scope) / 2


@dataclass(frozen=True, slots=True)
class Sweep:
    """The two shares of the objective under one threshold."""

    threshold: float
    in_scope: float
    out_of_scope: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """`now`: the thresholds in force; `one`: the best single one; `each`: the best one per route."""

    now: Fit
    one: Fit
    each: Fit
    sweep: tuple[Sweep, ...]
    """What one threshold for all routes does, at every hundredth."""

    @property
    def chosen(self) -> Fit:
        """One a route where that holds up on unseen prompts, else the single one."""
        if self.each.held_out is None or self.one.held_out is None:
            return self.one
        return self.each if self.each.held_out > self.one.held_out + _TIE else self.one


def calibrate(seen: Observations) -> Calibration | None:
    """None: no threshold decides, or prompts of one of the two kinds are missing.

    Without prompts of no route the best threshold is none at all.
    """
    decided = seen.scored
    if not (decided & seen.in_scope).any() or not (decided & ~seen.in_scope).any():
        return None
    folds = _folds(seen)
    one, each = _fit_one(seen), _fit_each(seen)
    return Calibration(
        # Nothing was fitted, so every prompt is unseen.
        now=_fit(seen, seen.thresholds, _objective(seen, outcomes_at(seen, seen.thresholds))),
        one=_fit(seen, one, _held_out(seen, folds, per_route=False)),
        each=_fit(seen, each, _held_out(seen, folds, per_route=True)),
        sweep=tuple(_sweep(seen)),
    )


def _fit(seen: Observations, thresholds: Floats, held_out: float | None) -> Fit:
    in_scope, out_of_scope = _shares(seen, outcomes_at(seen, thresholds))
    named = {
        route: float(threshold)
        for route, threshold in zip(seen.routes, thresholds, strict=True)
        if not np.isnan(threshold)
    }
    return Fit(named, in_scope, out_of_scope, held_out)


def _sweep(seen: Observations) -> Iterator[Sweep]:
    routes, scores = best(seen.scores)
    fixed = ~seen.scored
    admitted = np.where(fixed, seen.right(seen.outcomes), seen.right(routes))
    rejected = np.where(fixed, admitted, seen.right(NONE))
    for step in range(101):
        threshold = step / 100
        right = np.where(scores >= threshold, admitted, rejected)
        inside, outside = right[seen.in_scope].mean(), right[~seen.in_scope].mean()
        yield Sweep(threshold, float(inside), float(outside))


def _shares(seen: Observations, outcomes: Ints) -> tuple[float, float]:
    right = seen.right(outcomes)
    return float(right[seen.in_scope].mean()), float(right[~seen.in_scope].mean())


def _objective(seen: Observations, outcomes: Ints) -> float:
    return sum(_shares(seen, outcomes)) / 2


def _weights(seen: Observations) -> Floats:
    """(n): by how much the objective grows when a prompt is right."""
    inside = int(seen.in_scope.sum())
    outside = len(seen.labels) - inside
    return np.where(seen.in_scope, 0.5 / max(1, inside), 0.5 / max(1, outside))


def _fit_one(seen: Observations) -> Floats:
    routes, scores = best(seen.scores)
    gains = _weights(seen) * _difference(seen.right(routes), seen.right(NONE))
    rows = seen.scored
    threshold = _cut(scores[rows], gains[rows], prior=None)
    return np.where(np.isnan(seen.thresholds), np.nan, threshold)


def _fit_each(seen: Observations) -> Floats:
    """Coordinate ascent from the single threshold; a route without evidence keeps that one."""
    prior = _fit_one(seen)
    thresholds = prior.copy()
    for _ in range(_ROUNDS):
        before = thresholds.copy()
        for route in np.flatnonzero(~np.isnan(thresholds)):
            thresholds[route] = _fit_route(seen, thresholds, int(route), float(prior[route]))
        if np.array_equal(thresholds, before, equal_nan=True):
            break
    return thresholds


def _fit_route(seen: Observations, thresholds: Floats, route: int, prior: float) -> float:
    """The best threshold of one route while the others keep theirs."""
    own = seen.scores[:, route]
    others = thresholds.copy()
    others[route] = np.inf
    without = outcomes_at(seen, others)
    rivals = np.where(
        without == NONE, -np.inf, np.take_along_axis(seen.scores, without[:, None], axis=1)[:, 0]
    )
    # Of two routes with one score the first in the file's order is taken.
    wins = (own > rivals) | ((own == rivals) & (route < without))
    rows = seen.scored & wins
    gains = _weights(seen) * _difference(seen.right(route), seen.right(without))
    return _cut(own[rows], gains[rows], prior=prior)


def _difference(admitted: Bools, rejected: Bools) -> Floats:
    return admitted.astype(np.float64) - rejected.astype(np.float64)


def _cut(scores: Floats, gains: Floats, *, prior: float | None) -> float:
    """The threshold in [0, 1] under which the gains of the scores at or above it add up to most.

    Every threshold between two neighbouring scores is as good. Of several such gaps the one that
    holds `prior` wins, and it is kept; else the widest does, and its middle is taken, so that scores
    a little off change nothing.
    """
    values, inverse = np.unique(scores, return_inverse=True)
    at_value = np.bincount(inverse, gains, minlength=len(values))
    # total[k]: what a threshold above values[k - 1] and up to values[k] gains; the last admits none.
    total = np.append(np.cumsum(at_value[::-1])[::-1], 0.0)
    above = np.clip(np.concatenate([[0.0], values]), 0.0, 1.0)
    up_to = np.clip(np.concatenate([values, [1.0]]), 0.0, 1.0)
    legal = up_to > above
    gaps = np.flatnonzero(legal & (total >= total[legal].max() - _TIE))
    if prior is not None and ((above[gaps] < prior) & (prior <= up_to[gaps])).any():
        return prior
    # The outermost gaps reach to 0 and to 1, which says nothing of how sure they are.
    inner = gaps[(gaps > 0) & (gaps < len(values))]
    gaps = inner if len(inner) else gaps
    widest = gaps[(up_to[gaps] - above[gaps]).argmax()]
    return _short(float(above[widest]), float(up_to[widest]))


def _short(above: float, up_to: float) -> float:
    """A number of few digits in (above, up_to], near the middle."""
    middle = (above + up_to) / 2
    for digits in range(3, 12):
        rounded = round(middle, digits)
        if above < rounded <= up_to:
            return rounded
    return up_to


def _held_out(seen: Observations, folds: Ints | None, *, per_route: bool) -> float | None:
    """Fit on four fifths, apply to the fifth that is left; the objective over all of these."""
    if folds is None:
        return None
    outcomes = seen.outcomes.copy()
    for fold in range(FOLDS):
        fitted_to, unseen = _rows(seen, folds != fold), folds == fold
        thresholds = (_fit_each if per_route else _fit_one)(fitted_to)
        outcomes[unseen] = outcomes_at(seen, thresholds)[unseen]
    return _objective(seen, outcomes)


def _folds(seen: Observations) -> Ints | None:
    """(n): a fold for each prompt, each label spread over all of them. None: too few to spread."""
    decided = seen.scored
    if min((decided & seen.in_scope).sum(), (decided & ~seen.in_scope).sum()) < FOLDS:
        return None
    shuffled = np.random.default_rng(_SEED).permutation(len(seen.labels))
    dealt = shuffled[np.argsort(seen.labels[shuffled], kind="stable")]
    folds = np.empty(len(dealt), np.int64)
    folds[dealt] = np.arange(len(dealt)) % FOLDS
    return folds


def _rows(seen: Observations, rows: Bools) -> Observations:
    return dataclasses.replace(
        seen, labels=seen.labels[rows], outcomes=seen.outcomes[rows], scores=seen.scores[rows]
    )
