"""What looks and headers are taken to mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.circuit import State
from extproc.core.errors import FallbackReason
from extproc.drill.events import Answered, Ended, Look
from extproc.drill.story import (
    Transition,
    entries,
    failure,
    most_at_once,
    percentile,
    result_of_visit,
    transitions,
)

CLOSED, HALF_OPEN, OPEN = State.CLOSED, State.HALF_OPEN, State.OPEN


def answer(attempts="", sent_s=0.0, done_s=1.0):
    return Answered(
        serial=0,
        sent_s=sent_s,
        done_s=done_s,
        took_s=done_s - sent_s,
        status=200,
        ended=Ended.WHOLE,
        attempts=attempts,
    )


@pytest.mark.parametrize(
    ("attempts", "result", "reason"),
    [
        ("a:200", "200", None),
        ("a:timeout,b:200", "timeout", FallbackReason.TIMEOUT),
        ("a:retried,a:5xx,b:200", "5xx", FallbackReason.SERVER_ERROR),
        ("a:retried,a:200", "200", None),
        ("a:circuit_open,b:200", None, None),
        ("a:overflow,b:200", None, None),
        ("b:200", None, None),
        ("", None, None),
    ],
)
def test_attempts_tell_whether_an_upstream_was_visited_and_how_that_ended(attempts, result, reason):
    assert result_of_visit(answer(attempts), "a") == result
    assert failure(answer(attempts), "a") == reason


def test_entries_of_a_client_that_left_keep_their_open_end():
    assert entries("a:timeout,b:") == [("a", "timeout"), ("b", "")]


@given(st.lists(st.sampled_from([True, False]), max_size=12), st.data())
def test_any_legal_run_of_a_circuit_is_read_back_from_its_counters(choices, data):
    """At most one cycle between two looks: cooldowns are longer than looks are apart."""
    entered, state, run = dict.fromkeys(State, 0), CLOSED, []
    looks = [Look(0.0, 0.0, state, dict(entered))]
    pending = 0
    for step, closes in enumerate(choices, start=1):
        state = {CLOSED: OPEN, OPEN: HALF_OPEN, HALF_OPEN: CLOSED if closes else OPEN}[state]
        entered[state] += 1
        run.append(state)
        pending += 1
        if pending == 2 or data.draw(st.booleans()):
            looks.append(Look(step, step, state, dict(entered)))
            pending = 0
    looks.append(Look(99.0, 99.0, state, dict(entered)))
    assert [each.after for each in transitions(looks)] == run


def test_a_transition_lies_between_two_looks():
    looks = [
        Look(0.0, 0.1, CLOSED, {CLOSED: 0, OPEN: 0, HALF_OPEN: 0}),
        Look(0.2, 0.3, OPEN, {CLOSED: 0, OPEN: 1, HALF_OPEN: 0}),
    ]
    assert transitions(looks) == [Transition(OPEN, 0.0, 0.3)]
    assert transitions([]) == []


def test_percentiles_are_values_that_occurred():
    assert percentile([4.0], 0.99) == 4.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(range(1, 101), 0.99) == 99


def test_those_who_meet_only_at_an_end_are_not_at_once():
    spans = [(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]
    assert most_at_once([answer(sent_s=a, done_s=b) for a, b in spans]) == 2
    assert most_at_once([]) == 0
