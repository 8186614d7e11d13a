"""Thresholds against brute force: no other number does better on the same prompts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.evaluation.calibrate import calibrate
from extproc.evaluation.metrics import NONE, outcomes_at

NAN = float("nan")
CODE, MATH, CHAT = 0, 1, 2
GRID = [0.05, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.95]
"""A number in every gap between the scores below."""

rows = st.lists(
    st.tuples(
        st.integers(NONE, 2),
        st.tuples(*[st.sampled_from([0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])] * 3),
    ),
    min_size=2,
    max_size=25,
).filter(lambda rows: len({label == NONE for label, _ in rows}) == 2)


def objective(seen, thresholds):
    right = seen.right(outcomes_at(seen, np.array(thresholds, float)))
    return (right[seen.in_scope].mean() + right[~seen.in_scope].mean()) / 2


@given(rows=rows)
def test_single_threshold_is_as_good_as_any(observe, rows):
    seen = observe(*zip(*rows, strict=True))
    one = calibrate(seen).one
    threshold = next(iter(one.thresholds.values()))
    assert set(one.thresholds.values()) == {threshold}
    assert 0 <= threshold <= 1
    assert one.balanced == pytest.approx(objective(seen, [threshold] * 3))
    assert one.balanced == pytest.approx(max(objective(seen, [each] * 3) for each in GRID))


@given(rows=rows)
def test_no_threshold_of_a_route_can_be_moved_for_the_better(observe, rows):
    seen = observe(*zip(*rows, strict=True))
    found = calibrate(seen)
    assert found.each.balanced >= found.one.balanced - 1e-9
    fitted = list(found.each.thresholds.values())
    assert found.each.balanced == pytest.approx(objective(seen, fitted))
    for route, other in itertools.product(range(3), GRID):
        moved = [other if at == route else each for at, each in enumerate(fitted)]
        assert objective(seen, moved) <= found.each.balanced + 1e-9


def test_separable_scores_are_cut_in_the_middle(observe):
    seen = observe([CODE] * 3 + [NONE] * 3, [(s, 0, 0) for s in (0.8, 0.7, 0.6, 0.2, 0.3, 0.4)])
    found = calibrate(seen)
    assert found.one.thresholds["code"] == 0.5
    assert found.one.balanced == 1


def test_route_without_evidence_keeps_the_single_threshold(observe):
    seen = observe([CODE, CODE, NONE], [(0.8, 0, 0), (0.7, 0, 0), (0.3, 0, 0)])
    found = calibrate(seen)
    assert found.each.thresholds["math"] == found.one.thresholds["math"] == 0.5


def test_routes_whose_scores_lie_apart_get_thresholds_apart(observe):
    rows = [(0.9, 0, 0)] * 5 + [(0, 0.3, 0)] * 5 + [(0.5, 0, 0)] * 5 + [(0, 0.1, 0)] * 5
    found = calibrate(observe([CODE] * 5 + [MATH] * 5 + [NONE] * 10, rows))
    assert found.one.balanced < 1
    assert found.each.balanced == 1
    assert 0.5 < found.each.thresholds["code"] <= 0.9
    assert 0.1 < found.each.thresholds["math"] <= 0.3
    assert found.each.held_out == 1
    assert found.chosen is found.each


def test_thresholds_that_fit_noise_are_not_chosen(observe):
    draw = np.random.default_rng(4)
    scores = draw.uniform(0, 1, (40, 3))
    found = calibrate(observe(draw.integers(-1, 3, 40), scores.tolist()))
    assert found.each.balanced > found.one.balanced
    assert found.each.held_out < found.one.held_out
    assert found.chosen is found.one


def test_too_few_prompts_to_hold_some_out_choose_the_single_threshold(observe):
    found = calibrate(observe([CODE, NONE], [(0.9, 0, 0), (0.1, 0, 0)]))
    assert found.each.held_out is None
    assert found.chosen is found.one


@pytest.mark.parametrize("label", [CODE, NONE])
def test_prompts_of_one_kind_calibrate_nothing(observe, label):
    assert calibrate(observe([label] * 9, [(0.9, 0, 0)] * 9)) is None


def test_prompts_that_were_not_scored_calibrate_nothing(observe):
    assert calibrate(observe([CODE, NONE], [(NAN, NAN, NAN)] * 2)) is None


def test_route_without_utterances_gets_no_threshold(observe):
    seen = observe([CODE, NONE], [(0.9, 0.1, NAN), (0.1, 0.2, NAN)], (0.3, 0.3, NAN))
    assert set(calibrate(seen).each.thresholds) == {"code", "math"}


def test_scores_under_nothing_and_over_one_leave_thresholds_between(observe):
    seen = observe([CODE] * 2 + [NONE] * 2, [(1.0000001, 0, 0)] * 2 + [(-0.2, -0.3, -0.1)] * 2)
    assert 0 <= calibrate(seen).one.thresholds["code"] <= 1
    assert calibrate(seen).one.balanced == 1


def test_what_a_keyword_decided_counts_and_moves_no_threshold(observe):
    rows = [(0.8, 0, 0), (0.2, 0, 0), (NAN, NAN, NAN)]
    seen = observe([CODE, NONE, CODE], rows)
    seen.outcomes[2] = MATH
    found = calibrate(seen)
    assert found.one.thresholds["code"] == 0.5
    assert (found.one.in_scope, found.one.out_of_scope) == (0.5, 1.0)


@given(rows=rows)
def test_sweep_is_what_each_single_threshold_does(observe, rows):
    seen = observe(*zip(*rows, strict=True))
    sweep = calibrate(seen).sweep
    assert len(sweep) == 101
    for point in sweep[::7]:
        mean = (point.in_scope + point.out_of_scope) / 2
        assert mean == pytest.approx(objective(seen, [point.threshold] * 3))


def test_calibration_is_the_same_each_time(observe):
    draw = np.random.default_rng(1)
    seen = observe(draw.integers(-1, 3, 50), draw.uniform(0, 1, (50, 3)).tolist())
    assert calibrate(seen) == calibrate(seen)
