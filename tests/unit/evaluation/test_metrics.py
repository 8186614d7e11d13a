"""Figures from labels, outcomes and scores, against the definitions written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.evaluation.metrics import (
    NONE,
    auroc,
    best,
    confusion,
    histograms,
    outcomes_at,
    per_route,
    rate,
    timing,
    top_1,
)

NAN = float("nan")
CODE, MATH, CHAT = 0, 1, 2

labels_and_scores = st.lists(
    st.tuples(
        st.integers(NONE, 2),
        # Few values, so that ties are common.
        st.tuples(*[st.sampled_from([-0.1, 0.2, 0.3, 0.5, 0.9])] * 3),
    ),
    min_size=1,
    max_size=30,
)


@given(rows=labels_and_scores, limits=st.tuples(*[st.sampled_from([0.1, 0.3, 0.5, 0.9])] * 3))
def test_outcomes_under_thresholds_are_those_that_core_decides(observe, rows, limits):
    labels, scores = zip(*rows, strict=True)
    seen = observe(labels, scores)
    decided = observe(labels, scores, limits).outcomes
    assert outcomes_at(seen, np.array(limits)).tolist() == decided.tolist()


def test_prompt_that_was_not_scored_keeps_its_outcome(observe):
    seen = observe([CODE, MATH], [(NAN, NAN, NAN), (0.1, 0.4, 0.2)])
    seen.outcomes[0] = CODE  # a keyword, say
    assert outcomes_at(seen, np.full(3, 0.9)).tolist() == [CODE, NONE]
    assert top_1(seen).tolist() == [CODE, MATH]


def test_default_and_no_route_are_one_place(observe):
    seen = observe(
        [CHAT, NONE, CHAT, NONE, CODE, NONE],
        [(0, 0, 0), (0, 0, 0.9), (0, 0, 0.9), (0, 0, 0), (0, 0, 0), (0.9, 0, 0)],
    )
    assert seen.right(seen.outcomes).tolist() == [True] * 4 + [False] * 2


def test_rate_of_nothing_is_none_and_its_interval_holds_the_share():
    assert rate(np.array([], bool)) is None
    found = rate(np.array([True] * 80 + [False] * 20))
    assert (found.count, found.total, found.share) == (80, 100, 0.8)
    # The normal approximation: 0.8 +- 1.96 * sqrt(0.8 * 0.2 / 100) = 0.8 +- 0.078.
    assert found.low == pytest.approx(0.722, abs=0.011)
    assert found.high == pytest.approx(0.878, abs=0.011)


def test_best_of_equal_scores_is_the_first_route():
    routes, scores = best(np.array([[0.5, 0.5, 0.1], [NAN, 0.2, 0.2]]))
    assert routes.tolist() == [0, 1]
    assert scores.tolist() == [0.5, 0.2]


@given(rows=labels_and_scores)
def test_auroc_is_the_share_of_pairs_in_the_right_order(observe, rows):
    labels, scores = zip(*rows, strict=True)
    inside = [max(row) for label, row in rows if label in (CODE, MATH)]
    outside = [max(row) for label, row in rows if label == NONE]
    found = auroc(observe(labels, scores))
    if not inside or not outside:
        assert found is None
        return
    wins = sum((a > b) + (a == b) / 2 for a in inside for b in outside)
    assert found == pytest.approx(wins / (len(inside) * len(outside)))


def test_auroc_leaves_out_what_was_not_scored_and_what_belongs_to_the_default(observe):
    rows = [(0.9, 0, 0), (NAN, NAN, NAN), (0, 0, 0.1), (0.2, 0, 0)]
    assert auroc(observe([CODE, CODE, CHAT, NONE], rows)) == 1.0


def test_confusion_counts_no_route_last(observe):
    rows = [(0.9, 0, 0), (0, 0.9, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0.9)]
    assert confusion(observe([CODE, CODE, CODE, NONE, NONE], rows)).tolist() == [
        [1, 1, 0, 1],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 1, 1],
    ]


def test_precision_and_recall_of_each_route_and_of_none(observe):
    rows = [(0.9, 0, 0), (0.9, 0, 0), (0, 0, 0), (0.9, 0, 0), (0, 0, 0.9)]
    code, math, chat, none = per_route(observe([CODE, CODE, CODE, MATH, NONE], rows), "none")
    assert (code.name, code.prompts) == ("code", 3)
    assert (code.precision, code.recall) == pytest.approx((2 / 3, 2 / 3))
    assert code.f1 == pytest.approx(2 / 3)
    assert (math.precision, math.recall, math.f1) == (None, 0.0, None)
    # What belongs to no route is right in the default's place.
    assert (chat.prompts, chat.precision, chat.recall) == (0, 1.0, None)
    assert (none.precision, none.recall, none.f1) == (0.0, 1.0, 0.0)


def test_timing_is_in_milliseconds_and_of_the_whole_run():
    found = timing(np.array([0.001, 0.002, 0.003]), total_s=0.5, workers=1)
    assert (found.p50_ms, found.decisions_per_s) == (2.0, 6.0)


def test_histograms_are_shares_over_one_range_by_kind_of_prompt(observe):
    rows = [(0.9, 0.1, -0.2), (0.2, 0.4, 0.1), (0.3, 0.1, 0.2), (NAN, NAN, NAN)]
    code, *others = histograms(observe([CODE, MATH, NONE, CODE], rows), bins=12)
    assert (code.edges[0], code.edges[-1]) == (-0.2, 1.0)
    assert all(each.edges == code.edges for each in others)
    assert all(sum(shares) == 1 for shares in (code.own, code.others, code.outside))
    assert code.own[-1] == 1


def test_route_without_utterances_has_no_histogram(observe):
    seen = observe([CODE, NONE], [(0.9, 0.1, NAN), (0.1, 0.2, NAN)], (0.3, 0.3, NAN))
    assert [each.route for each in histograms(seen)] == ["code", "math"]
    assert histograms(observe([CODE], [(NAN, NAN, NAN)])) == ()
