"""Made-up observations and evaluations; outcomes are decided by core, from the scores alone."""

import numpy as np
import pytest

from extproc.core.errors import RouteReason
from extproc.core.routing import RouteDecision, RouteScore, decide_by_scores
from extproc.evaluation.evaluate import Case, evaluate
from extproc.evaluation.metrics import NONE, Observations, Timing
from extproc.evaluation.prompts import Prompt

ROUTES = ("code", "math", "chat")
TIMING = Timing(p50_ms=0.9, p95_ms=1.4, decisions_per_s=900.0, total_s=1.0, workers=2)


def decide(scores, thresholds, routes=ROUTES, default="chat"):
    """What core decides about a row of scores; NaN: that route has no utterances."""
    given = zip(routes, scores, thresholds, strict=True)
    scored = tuple(RouteScore(*each) for each in given if not np.isnan(each[1]))
    return decide_by_scores(scored, default=default)


@pytest.fixture(scope="session")
def observe():
    """labels (indexes, -1: none), rows of scores -> Observations; the last route is the default."""

    def build(labels, scores, thresholds=(0.3, 0.3, 0.3)):
        routes = ROUTES[-len(thresholds) :]
        outcomes = []
        for row in scores:
            decision = decide(row, thresholds, routes)
            semantic = decision.reason is RouteReason.SEMANTIC
            outcomes.append(routes.index(decision.route) if semantic else NONE)
        return Observations(
            routes,
            len(routes) - 1,
            np.array(labels, np.int64),
            np.array(outcomes, np.int64),
            np.array(scores, np.float64).reshape(len(labels), len(routes)),
            np.array(thresholds, np.float64),
        )

    return build


@pytest.fixture(scope="session")
def evaluated():
    """(text, route, scores or a RouteDecision)... -> Evaluation over code, math and chat."""

    def build(*rows, utterances=None, default="chat"):
        cases = []
        for text, route, found in rows:
            decided = isinstance(found, RouteDecision)
            decision = found if decided else decide(found, (0.3, 0.3, 0.3), default=default)
            cases.append(Case(Prompt(text, route), decision, 0.001))
        routes = utterances or {name: (f"an utterance of {name}",) for name in ROUTES}
        return evaluate(cases, routes, default=default, timing=TIMING)

    return build
