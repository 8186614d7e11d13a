"""The static encoder's own index, fitted on the routes' utterances to decide as the full one. Pure.

Fit. Each utterance is scored on every route by both encoders, on its own one as if that had never heard of
it. A line through these pairs carries each threshold from the full encoder's scale to the static one's. How
far they scatter around it says by how much to lower thresholds, so that what the full encoder admits is
admitted, and how big a margin must be to mean something. Nothing else is learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from extproc.core.routing import (
    RouteRule,
    RouteScore,
    SemanticIndex,
    Vectors,
    decide_by_scores,
)

Utterances: TypeAlias = Mapping[str, Sequence[Vectors]]
"""Of each route with utterances, each utterance's vectors: (k, dimension), k = 1 or 2."""

_SAMPLE: Final = 512
"""Utterances that are fitted on, evenly drawn: beyond, only the time to start would grow."""
_ENOUGH: Final = 20
"""With fewer utterances no margin is decisive, and thresholds stay as they are."""
_LENIENT: Final = 1.0
"""By how many of the scatter's deviations thresholds are lowered: of the prompts that the full encoder
just admits, five of six are admitted. At 0 half of them went to the default route under overload."""
_DECISIVE: Final = 3.0
"""How many deviations a decisive margin has at least, over thresholds that are not lowered."""
_SLOPES: Final = (0.5, 2.0)
"""A line outside of it fits noise."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """An utterance as a prompt; the own route, if left without utterances, is not among the scores."""

    full: tuple[RouteScore, ...]
    fast: tuple[RouteScore, ...]


class FastIndex:
    """Scores that decide; built once, then constant."""

    def __init__(self, rules: Sequence[RouteRule], *, full: Utterances, fast: Utterances) -> None:
        """`full` and `fast`: the same utterances in the same order, by either encoder."""
        rules = [rule for rule in rules if rule.utterances]
        trials = _trials(rules, full, fast)
        slope, intercept, deviation = _line(trials)
        lowered = _LENIENT * deviation if math.isfinite(deviation) else 0.0
        self._strict = {rule.name: slope * rule.effective_threshold + intercept for rule in rules}
        own = [
            replace(rule, threshold=_fraction(self._strict[rule.name] - lowered)) for rule in rules
        ]
        self._index = SemanticIndex(own, _joined(fast))
        self.margin = self._decisive_margin(trials, deviation)
        """From this margin on, a decision is the full encoder's."""

    def scores_all(self, queries: Sequence[Vectors]) -> list[tuple[RouteScore, ...]]:
        return self._index.scores_all(queries)

    def is_decisive(self, scores: tuple[RouteScore, ...]) -> bool:
        """Whether the full encoder would decide alike: at least 99 % on the routes' own utterances."""
        return bool(scores) and margin(self._strictly(scores)) > self.margin

    def _decisive_margin(self, trials: Sequence[_Trial], deviation: float) -> float:
        if len(trials) < _ENOUGH:
            return math.inf
        wrong = [0.0]
        for trial in trials:
            fast = self._strictly(trial.fast)
            if _choice(fast) != _choice(trial.full):
                wrong.append(margin(fast))
        return max(_DECISIVE * deviation, *wrong)

    def _strictly(self, scores: tuple[RouteScore, ...]) -> tuple[RouteScore, ...]:
        return tuple(replace(each, threshold=self._strict[each.route]) for each in scores)


def margin(scores: tuple[RouteScore, ...]) -> float:
    """How far the best score is from deciding otherwise; negative: below its threshold."""
    best = max(scores, key=lambda each: each.score)
    others = [each.score for each in scores if each is not best]
    return best.score - max([best.threshold, *others])


def _choice(scores: tuple[RouteScore, ...]) -> str:
    return decide_by_scores(scores, default="").route


def _trials(rules: Sequence[RouteRule], full: Utterances, fast: Utterances) -> list[_Trial]:
    of = [(route, at) for route, rule in enumerate(rules) for at in range(len(full[rule.name]))]
    step = -(-len(of) // _SAMPLE) or 1
    indexes = [(SemanticIndex(rules, _joined(kind)), kind) for kind in (full, fast)]
    return [
        _Trial(*(_left_out(rules, index, kind, route, at) for index, kind in indexes))
        for route, at in of[::step]
    ]


def _left_out(
    rules: Sequence[RouteRule], index: SemanticIndex, kind: Utterances, route: int, at: int
) -> tuple[RouteScore, ...]:
    """The scores of an utterance, its own route without it."""
    rule = rules[route]
    own = kind[rule.name]
    others = [*own[:at], *own[at + 1 :]]
    scores = list(index.scores(own[at]))
    scores[route : route + 1] = (
        SemanticIndex([rule], {rule.name: np.concatenate(others)}).scores(own[at]) if others else ()
    )
    # The rule knows how many utterances it really has, and so its threshold.
    return tuple(scores)


def _line(trials: Sequence[_Trial]) -> tuple[float, float, float]:
    """Least squares of fast scores on full ones: slope, intercept, and the deviation around it."""
    pairs = np.array(
        [
            (full.score, fast.score)
            for trial in trials
            for full, fast in zip(trial.full, trial.fast, strict=True)
        ]
    ).reshape(-1, 2)
    x, y = pairs.T
    if len(trials) < _ENOUGH or float(x.std()) == 0.0:
        return 1.0, 0.0, math.inf
    slope = float(((x - x.mean()) * (y - y.mean())).mean() / x.var())
    if not _SLOPES[0] <= slope <= _SLOPES[1]:
        return 1.0, 0.0, math.inf
    intercept = float(y.mean() - slope * x.mean())
    return slope, intercept, float((y - slope * x - intercept).std())


def _fraction(threshold: float) -> float:
    return min(max(threshold, 0.0), 1.0)


def _joined(kind: Utterances) -> dict[str, Vectors]:
    return {route: np.concatenate(utterances) for route, utterances in kind.items()}
