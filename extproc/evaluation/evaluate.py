"""Decisions about labelled prompts -> one `Evaluation`, plain data for every report; it decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from extproc.core.errors import RouteReason
from extproc.core.routing import RouteDecision
from extproc.evaluation import metrics
from extproc.evaluation.calibrate import Calibration, calibrate
from extproc.evaluation.metrics import (
    NONE,
    Histogram,
    Observations,
    Rate,
    RouteFigures,
    Timing,
)
from extproc.evaluation.prompts import Prompt, printable

NO_ROUTE: Final = "(no route)"
"""Of a prompt that belongs nowhere, and of a decision that no route's signal made. No route can be
called so: names have no brackets."""

_MISTAKES: Final = 40
_ALIKE: Final = 5
"""Mistakes shown of one kind: the twentieth of a pair of routes teaches nothing new."""
_TEXT_CHARS: Final = 280
_UNDECIDED: Final = (
    RouteReason.DEGRADED_BODY,
    RouteReason.DEGRADED_DEADLINE,
    RouteReason.DEGRADED_QUEUE_FULL,
    RouteReason.DEGRADED_WORKER,
)
_NO_SIGNAL: Final = (RouteReason.DEFAULT, *_UNDECIDED)


@dataclass(frozen=True, slots=True)
class Case:
    prompt: Prompt
    decision: RouteDecision
    seconds: float


@dataclass(frozen=True, slots=True)
class Mistake:
    text: str
    expected: str
    went_to: str
    reason: str
    matched: str | None
    expected_score: float | None
    went_to_score: float | None
    threshold: float | None
    """That of the route it went to; where none admitted it, that of the route it belongs to."""
    by: float
    """How far the scores are from the right decision; 1 where the model was not asked."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """None: the prompts do not tell, for want of one of the two kinds."""

    prompts: int
    in_scope: int
    default: str
    accuracy: Rate | None
    """In-scope prompts that arrived at their route."""
    top_1: Rate | None
    """The same without thresholds: in-scope prompts whose best route is the right one."""
    rejection: Rate | None
    """Prompts of no route that arrived at the default: out-of-scope recall."""
    auroc: float | None
    routes: tuple[RouteFigures, ...]
    classes: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Rows: where prompts belong; columns: where they went; both in the order of `classes`."""
    reasons: dict[str, int]
    undecided: int
    """Prompts that the encoder failed on; they count as sent to the default."""
    repeated: int
    """Prompts that are an utterance of the routes word for word, and so too easy."""
    calibration: Calibration | None
    histograms: tuple[Histogram, ...]
    mistakes: tuple[Mistake, ...]
    mistaken: int
    timing: Timing


def evaluate(
    cases: Sequence[Case],
    utterances: Mapping[str, Sequence[str]],
    *,
    default: str,
    timing: Timing,
) -> Evaluation:
    """`utterances`: those of every route, in the configuration's order; `cases`: at least one."""
    seen = observe(cases, utterances, default=default)
    inside, right = seen.in_scope, seen.right(seen.outcomes)
    classes, confusion = _confusion(seen)
    known = {folded(utterance) for own in utterances.values() for utterance in own}
    reasons = Counter(case.decision.reason for case in cases)
    return Evaluation(
        prompts=len(cases),
        in_scope=int(inside.sum()),
        default=default,
        accuracy=metrics.rate(right[inside]),
        top_1=metrics.rate(seen.right(metrics.top_1(seen))[inside]),
        rejection=metrics.rate(right[~inside]),
        auroc=metrics.auroc(seen),
        routes=metrics.per_route(seen, NO_ROUTE),
        classes=classes,
        confusion=confusion,
        reasons={reason.value: count for reason, count in reasons.most_common()},
        undecided=sum(reasons[reason] for reason in _UNDECIDED),
        repeated=sum(folded(case.prompt.text) in known for case in cases),
        calibration=calibrate(seen),
        histograms=metrics.histograms(seen),
        mistakes=_worst(cases, seen),
        mistaken=int((~right).sum()),
        timing=timing,
    )


def _confusion(seen: Observations) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Without the routes that no prompt belongs to and none went to."""
    counts = metrics.confusion(seen)
    used = np.flatnonzero(counts.any(axis=0) | counts.any(axis=1))
    names = (*seen.routes, NO_ROUTE)
    rows = tuple(tuple(map(int, row)) for row in counts[np.ix_(used, used)])
    return tuple(names[at] for at in used), rows


def observe(
    cases: Sequence[Case], utterances: Mapping[str, Sequence[str]], *, default: str
) -> Observations:
    """`utterances`: as in `evaluate`."""
    routes = tuple(utterances)
    index = {route: at for at, route in enumerate(routes)}
    labels: dict[str | None, int] = {None: NONE}
    labels.update(index)
    if not utterances[default]:
        # A default without utterances is what is left over: its prompts belong to no route.
        labels[default] = NONE
    scores = np.full((len(cases), len(routes)), np.nan)
    thresholds = np.full(len(routes), np.nan)
    for row, case in enumerate(cases):
        for score in case.decision.scores:
            scores[row, index[score.route]] = score.score
            thresholds[index[score.route]] = score.threshold
    decisions = [case.decision for case in cases]
    return Observations(
        routes=routes,
        default=index[default],
        labels=np.array([labels[case.prompt.route] for case in cases], np.int64),
        outcomes=np.array(
            [NONE if each.reason in _NO_SIGNAL else index[each.route] for each in decisions],
            np.int64,
        ),
        scores=scores,
        thresholds=thresholds,
    )


def folded(text: str) -> str:
    """Alike for texts that differ in case and spaces only."""
    return " ".join(text.split()).casefold()


def _worst(cases: Sequence[Case], seen: Observations) -> tuple[Mistake, ...]:
    """Those furthest from right, and not too many of one kind."""
    wrong = np.flatnonzero(~seen.right(seen.outcomes)).tolist()
    mistakes = [_mistake(cases[row], seen, row) for row in wrong]
    mistakes.sort(key=lambda mistake: -mistake.by)
    kinds: Counter[tuple[str, str]] = Counter()
    shown: list[Mistake] = []
    for mistake in mistakes:
        kind = (mistake.expected, mistake.went_to)
        kinds[kind] += 1
        if kinds[kind] <= _ALIKE and len(shown) < _MISTAKES:
            shown.append(mistake)
    return tuple(shown)


def _mistake(case: Case, seen: Observations, row: int) -> Mistake:
    label, outcome = int(seen.labels[row]), int(seen.outcomes[row])
    own = _number(seen.scores[row, label]) if label != NONE else None
    won = _number(seen.scores[row, outcome]) if outcome != NONE else None
    threshold = _number(seen.thresholds[label if outcome == NONE else outcome])
    needed = own if outcome != NONE and own is not None else threshold
    reached = own if outcome == NONE else won
    by = 1.0 if needed is None or reached is None else abs(reached - needed)
    text = case.prompt.text
    return Mistake(
        text=printable(text[:_TEXT_CHARS]) + ("…" if len(text) > _TEXT_CHARS else ""),
        expected=NO_ROUTE if label == NONE else seen.routes[label],
        went_to=NO_ROUTE if outcome == NONE else seen.routes[outcome],
        reason=case.decision.reason.value,
        matched=None if case.decision.matched is None else printable(case.decision.matched),
        expected_score=own,
        went_to_score=won,
        threshold=threshold,
        by=by,
    )


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
