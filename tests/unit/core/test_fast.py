"""The fit of the static encoder's index: thresholds carried over, and a margin that means something."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.fast import FastIndex, margin
from extproc.core.routing import RouteRule, RouteScore, SemanticIndex, decide_by_scores

ROUTES, EACH, WIDTH = 4, 12, 24


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def of(index, query):
    """The scores of one query."""
    (scores,) = index.scores_all([query])
    return scores


class World:
    """Clustered utterances by a full encoder, and by a static one that sees them through noise."""

    def __init__(self, *, noise: float, seed: int = 0, each: int = EACH) -> None:
        self.dice = np.random.default_rng(seed)
        self.noise = noise
        self.centres = unit(self.dice.normal(size=(ROUTES, WIDTH)))
        self.names = [f"r{n}" for n in range(ROUTES)]
        self.rules = [RouteRule(name, utterances=tuple("x" * each)) for name in self.names]
        self.full = {
            name: [self.draw(at) for _ in range(each)] for at, name in enumerate(self.names)
        }
        self.fast = {name: [self.seen(each) for each in own] for name, own in self.full.items()}

    def draw(self, route):
        return unit(self.centres[route] + self.dice.normal(size=(1, WIDTH), scale=0.25))

    def seen(self, vector):
        return unit(vector + self.dice.normal(size=vector.shape, scale=self.noise))

    def index(self):
        return FastIndex(self.rules, full=self.full, fast=self.fast)


def joined(kind):
    return {name: np.concatenate(own) for name, own in kind.items()}


def test_the_same_encoder_keeps_its_thresholds():
    world = World(noise=0)
    scores = of(world.index(), world.draw(0))
    expected = SemanticIndex(world.rules, joined(world.full)).scores(world.draw(0))
    assert [each.threshold for each in scores] == pytest.approx([e.threshold for e in expected])


def test_thresholds_follow_an_encoder_whose_scores_are_lower():
    world = World(noise=0.15)
    (first, *_) = of(world.index(), world.draw(0))
    assert first.threshold < world.rules[0].effective_threshold - 0.01


@pytest.mark.parametrize("seed", range(3))
def test_what_the_full_index_admits_is_admitted(seed):
    world = World(noise=0.05, seed=seed)
    full, fast = SemanticIndex(world.rules, joined(world.full)), world.index()
    alike = 0
    for number in range(200):
        vector = world.draw(number % ROUTES)
        wanted = decide_by_scores(full.scores(vector), default="").route
        alike += decide_by_scores(of(fast, world.seen(vector)), default="").route == wanted
    assert alike >= 180


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_decisive_margins_agree_with_the_full_index(noise, seed):
    world = World(noise=noise, seed=seed)
    full, fast = SemanticIndex(world.rules, joined(world.full)), world.index()
    decisive = alike = 0
    for number in range(400):
        vector = unit(world.draw(number % ROUTES) + world.dice.normal(size=(1, WIDTH), scale=0.2))
        scores = of(fast, world.seen(vector))
        if fast.is_decisive(scores):
            decisive += 1
            wanted = decide_by_scores(full.scores(vector), default="").route
            alike += decide_by_scores(scores, default="").route == wanted
    assert decisive > 0
    assert alike >= 0.99 * decisive


def test_noise_makes_the_margin_wider():
    margins = [World(noise=noise).index().margin for noise in (0.02, 0.1, 0.3)]
    assert margins == sorted(margins)
    assert margins[0] < margins[-1]


def test_few_utterances_are_never_decisive_and_keep_their_thresholds():
    world = World(noise=0.1, each=4)
    index = world.index()
    assert index.margin == math.inf
    scores = of(index, world.fast["r0"][0])
    assert not index.is_decisive(scores)
    assert {each.threshold for each in scores} == {world.rules[0].effective_threshold}


def test_no_utterances_give_no_scores_and_decide_nothing():
    index = FastIndex([RouteRule("bare")], full={}, fast={})
    assert of(index, np.ones((1, 4), np.float32)) == ()
    assert not index.is_decisive(())


def test_an_only_utterance_and_long_ones_are_fitted_too():
    world = World(noise=0.05)
    rules = [*world.rules, RouteRule("one", utterances=("only",))]
    both = np.concatenate([world.draw(0), world.draw(1)])
    full = world.full | {"one": [both]}
    index = FastIndex(rules, full=full, fast=world.fast | {"one": [world.seen(both)[:1]]})
    assert len(of(index, world.draw(0))) == ROUTES + 1


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((("a", 0.6, 0.3), ("b", 0.5, 0.3)), 0.1),
        ((("a", 0.6, 0.55), ("b", 0.2, 0.3)), 0.05),
        ((("a", 0.2, 0.3), ("b", 0.1, 0.3)), -0.1),
        ((("a", 0.6, 0.3), ("b", 0.6, 0.3)), 0.0),
        ((("a", 0.6, 0.3),), 0.3),
    ],
)
def test_margin_is_the_way_to_any_other_decision(scores, expected):
    assert margin(tuple(RouteScore(*each) for each in scores)) == pytest.approx(expected)


@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.floats(0, 1)).map(lambda pair: RouteScore("r", *pair)),
        min_size=1,
        max_size=6,
    )
)
def test_a_positive_margin_means_that_the_best_is_admitted(scores):
    if margin(tuple(scores)) > 0:
        best = max(scores, key=lambda each: each.score)
        assert best.admitted
