"""The gate's rules as literal timelines, and as a state machine against a reference that only counts."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from extproc.core.circuit import (
    Cause,
    CircuitPolicy,
    CircuitView,
    GateBank,
    State,
    Ticket,
    Transition,
    Trial,
)
from extproc.core.errors import FallbackReason

TIMEOUT = FallbackReason.TIMEOUT
ARTICLE = CircuitPolicy()  # 5 failures, 30 s, 30 s, 3 trials
TRIAL_TIMEOUT_S = 6.0
UPSTREAMS = ("a", "b", "c")

OPENED = Transition("a", State.CLOSED, State.OPEN, Cause.THRESHOLD)
EJECTED = Transition("a", State.CLOSED, State.OPEN, Cause.EJECTED)
COOLED = Transition("a", State.OPEN, State.HALF_OPEN, Cause.COOLDOWN)
CLOSED = Transition("a", State.HALF_OPEN, State.CLOSED, Cause.TRIAL_SUCCEEDED)
REOPENED = Transition("a", State.HALF_OPEN, State.OPEN, Cause.TRIAL_FAILED)


def new_bank(policy: CircuitPolicy = ARTICLE, *, run: str = "r1") -> GateBank:
    return GateBank(policy, dict.fromkeys(UPSTREAMS, TRIAL_TIMEOUT_S), run=run)


def visit(bank: GateBank, upstream: str, now_s: float) -> Ticket:
    """Admit a request that may try `upstream` alone."""
    admission = bank.admit((upstream,), now_s)
    assert admission.skip == ()
    return admission.ticket


def trip(bank: GateBank, upstream: str, now_s: float) -> None:
    """Open a closed circuit at `now_s`."""
    (moved,) = bank.ejected(upstream, visit(bank, upstream, now_s), now_s)
    assert moved.after is State.OPEN


def recover(bank: GateBank, upstream: str, now_s: float) -> None:
    """Close an open circuit whose cooldown is over."""
    (moved,) = bank.succeeded(upstream, visit(bank, upstream, now_s), now_s)
    assert moved.after is State.CLOSED


# --- closed ---------------------------------------------------------------------------------------


def test_closed_circuits_let_every_chain_pass_and_hold_no_token():
    admission = new_bank().admit(("a", "b"), 0.0)

    assert admission.skip == ()
    assert admission.ticket == Ticket("r1", 0)
    assert admission.transitions == ()


def test_the_hot_path_looks_at_no_chain_while_all_circuits_are_closed():
    bank = new_bank()
    assert bank.admit(("a", "b"), 0.0) is bank.admit(("c",), 1.0)
    for upstream in ("a", "b"):
        trip(bank, upstream, 1.0)
    for upstream in ("a", "b"):
        recover(bank, upstream, 31.0)
    assert bank.admit(("a", "b"), 32.0) is bank.admit(("c",), 33.0)


def test_article_fifth_failure_opens():
    bank = new_bank()
    tickets = [visit(bank, "a", at) for at in (0.0, 0.1, 0.2, 0.3, 0.4)]

    moved = [bank.failed("a", TIMEOUT, ticket, 5.0 + at) for at, ticket in enumerate(tickets)]

    assert moved == [(), (), (), (), (OPENED,)]


def test_flaky_four_failures_and_a_success_repeated_opens():
    bank = new_bank()
    moved = []
    for at, ok in enumerate([False, False, False, False, True, False]):
        ticket = visit(bank, "a", at)
        moved.append(
            bank.succeeded("a", ticket, at) if ok else bank.failed("a", TIMEOUT, ticket, at)
        )

    assert moved == [(), (), (), (), (), (OPENED,)]


@pytest.mark.parametrize(("last_s", "opens"), [(30.0, True), (30.001, False)])
def test_failures_count_only_inside_the_window(last_s: float, opens: bool):
    bank = new_bank()
    for at in (0.0, 1.0, 2.0, 3.0):
        bank.failed("a", TIMEOUT, visit(bank, "a", at), at)

    assert bool(bank.failed("a", TIMEOUT, visit(bank, "a", last_s), last_s)) is opens


def test_window_slides_past_failures_that_are_too_old():
    bank = new_bank()
    times = [0.0, 20.0, 21.0, 22.0, 40.0, 49.0]  # five inside 30 s only from 20.0 on

    moved = [bank.failed("a", TIMEOUT, visit(bank, "a", at), at) for at in times]

    assert moved == [(), (), (), (), (), (OPENED,)]


@pytest.mark.parametrize("reason", list(FallbackReason))
def test_only_counted_errors_open(reason: FallbackReason):
    bank = new_bank()
    for at in range(5):
        bank.failed("a", reason, visit(bank, "a", at), at)

    expected = State.OPEN if reason in ("timeout", "5xx", "connect_error") else State.CLOSED
    assert bank.state("a", 5.0) is expected


def test_counted_errors_are_the_policys():
    policy = replace(
        ARTICLE, failure_threshold=1, counted_errors=frozenset({FallbackReason.BAD_SCHEMA})
    )
    bank = new_bank(policy)

    assert bank.failed("a", TIMEOUT, visit(bank, "a", 0), 0) == ()
    assert bank.failed("a", FallbackReason.BAD_SCHEMA, visit(bank, "a", 0), 0) == (OPENED,)


def test_ejection_by_envoy_opens():
    bank = new_bank()

    assert bank.ejected("a", visit(bank, "a", 0.0), 0.1) == (EJECTED,)


def test_failures_before_an_opening_do_not_count_after_the_recovery():
    bank = new_bank(replace(ARTICLE, cooldown_s=1.0))
    for at in (0.0, 0.1, 0.2, 0.3):
        bank.failed("a", TIMEOUT, visit(bank, "a", at), at)
    trip(bank, "a", 0.4)
    recover(bank, "a", 1.5)

    assert bank.failed("a", TIMEOUT, visit(bank, "a", 1.5), 1.5) == ()


def test_upstreams_fail_apart():
    bank = new_bank()
    for at in range(4):
        for upstream in ("a", "b"):
            bank.failed(upstream, TIMEOUT, visit(bank, upstream, at), at)

    assert bank.state("a", 4.0) is State.CLOSED


# --- open -----------------------------------------------------------------------------------------


def test_article_open_circuit_lets_nothing_through_for_thirty_seconds():
    bank = new_bank()
    trip(bank, "a", 100.0)

    assert [bank.admit(("a", "b"), at).skip for at in (100.0, 115.0, 129.999)] == [("a",)] * 3
    assert bank.admit(("a", "b"), 130.0).skip == ()


def test_cooldown_counts_from_the_opening_not_from_the_last_failure():
    bank = new_bank()
    in_flight = [visit(bank, "a", 0.0) for _ in range(55)]
    moved = [
        bank.failed("a", TIMEOUT, ticket, 5.0 + at / 10) for at, ticket in enumerate(in_flight)
    ]

    assert [at for at, transitions in enumerate(moved) if transitions] == [4]  # at 5.4 s
    assert bank.state("a", 35.3) is State.OPEN
    assert bank.state("a", 35.5) is State.HALF_OPEN


@pytest.mark.parametrize("epoch_of", ["before", "while_open"])
def test_news_moves_no_open_circuit(epoch_of: str):
    bank = new_bank()
    before = visit(bank, "a", 0.0)
    trip(bank, "a", 0.0)
    ticket = before if epoch_of == "before" else bank.admit(("a",), 1.0).ticket

    assert bank.succeeded("a", ticket, 1.0) == ()
    assert bank.failed("a", TIMEOUT, ticket, 1.0) == ()
    assert bank.ejected("a", ticket, 1.0) == ()
    assert bank.state("a", 29.9) is State.OPEN
    assert bank.state("a", 30.0) is State.HALF_OPEN


def test_a_look_at_the_state_moves_nothing():
    bank = new_bank()
    trip(bank, "a", 0.0)

    assert bank.state("a", 30.0) is State.HALF_OPEN
    assert bank.admit(("a",), 30.0).transitions == (COOLED,)
    assert bank.admit(("a",), 30.0).transitions == ()


# --- half-open ------------------------------------------------------------------------------------


@pytest.fixture
def half_open() -> GateBank:
    """`a` may be tried again from 30.0 on."""
    bank = new_bank()
    trip(bank, "a", 0.0)
    return bank


def test_article_half_open_lets_three_through_at_once(half_open: GateBank):
    admissions = [half_open.admit(("a", "b"), 30.0) for _ in range(4)]

    assert [admission.skip for admission in admissions] == [(), (), (), ("a",)]
    assert [admission.ticket.trials for admission in admissions] == [
        (Trial("a", 1),),
        (Trial("a", 2),),
        (Trial("a", 3),),
        (),
    ]


def test_first_success_closes(half_open: GateBank):
    first, second = visit(half_open, "a", 30.0), visit(half_open, "a", 30.0)

    assert half_open.succeeded("a", second, 30.1) == (CLOSED,)
    assert half_open.succeeded("a", first, 30.2) == ()
    assert [half_open.admit(("a",), 30.2).skip for _ in range(10)] == [()] * 10


def test_a_failed_trial_opens_for_another_cooldown(half_open: GateBank):
    assert half_open.failed("a", TIMEOUT, visit(half_open, "a", 30.0), 35.0) == (REOPENED,)
    assert half_open.admit(("a",), 64.9).skip == ("a",)
    assert half_open.admit(("a",), 65.0).skip == ()


@pytest.mark.parametrize("end", ["abandoned", "ejected", "rate_limited"])
def test_an_end_that_proves_nothing_gives_one_token_back(half_open: GateBank, end: str):
    ticket, *_ = [visit(half_open, "a", 30.0) for _ in range(3)]
    for _ in range(2):  # told twice, it counts once
        if end == "abandoned":
            half_open.abandoned("a", ticket)
        elif end == "ejected":
            assert half_open.ejected("a", ticket, 30.1) == ()
        else:
            assert half_open.failed("a", FallbackReason.RATE_LIMITED, ticket, 30.1) == ()

    assert half_open.admit(("a",), 30.2).skip == ()
    assert half_open.admit(("a",), 30.2).skip == ("a",)


def test_lost_trials_free_their_tokens_at_their_deadline(half_open: GateBank):
    for _ in range(3):
        visit(half_open, "a", 30.0)

    assert half_open.admit(("a",), 35.999).skip == ("a",)
    assert [half_open.admit(("a",), 36.0).skip for _ in range(4)] == [(), (), (), ("a",)]


@pytest.mark.parametrize("ok", [True, False])
def test_a_verdict_after_the_deadline_still_holds(half_open: GateBank, ok: bool):
    late, *_ = [visit(half_open, "a", 30.0) for _ in range(3)]
    for _ in range(3):
        visit(half_open, "a", 36.0)  # the late one's token is gone

    if ok:
        assert half_open.succeeded("a", late, 36.1) == (CLOSED,)
    else:
        assert half_open.failed("a", TIMEOUT, late, 36.1) == (REOPENED,)


def test_trials_of_an_earlier_half_open_period_hold_their_tokens_in_the_next():
    bank = new_bank(replace(ARTICLE, cooldown_s=1.0))  # shorter than the 6 s that a trial may take
    trip(bank, "a", 0.0)
    refused, hung, gone = [visit(bank, "a", 1.0) for _ in range(3)]
    assert bank.failed("a", FallbackReason.CONNECT_ERROR, refused, 1.0) == (REOPENED,)

    assert [bank.admit(("a",), 2.0).skip for _ in range(2)] == [(), ("a",)]
    bank.abandoned("a", gone)
    assert [bank.admit(("a",), 2.0).skip for _ in range(2)] == [(), ("a",)]
    assert bank.failed("a", TIMEOUT, hung, 2.0) == ()  # stale: its token, not its verdict
    assert [bank.admit(("a",), 2.0).skip for _ in range(2)] == [(), ("a",)]


def test_a_request_that_was_skipped_has_no_say(half_open: GateBank):
    for _ in range(3):
        visit(half_open, "a", 30.0)
    skipped = half_open.admit(("a", "b"), 30.0)

    assert skipped.skip == ("a",)
    assert half_open.succeeded("a", skipped.ticket, 30.1) == ()
    for _ in range(5):
        assert half_open.failed("a", TIMEOUT, skipped.ticket, 30.1) == ()


def test_a_trial_of_one_upstream_is_no_trial_of_another():
    bank = new_bank()
    for upstream in ("a", "b"):
        trip(bank, upstream, 0.0)
    ticket = visit(bank, "a", 30.0)
    bank.admit(("b",), 30.0)  # b is half-open as well
    trial_of_a = replace(ticket, epoch=bank.admit(("b",), 30.0).ticket.epoch)

    assert bank.succeeded("b", trial_of_a, 30.1) == ()


# --- stale, foreign and unreadable news -----------------------------------------------------------


def test_a_success_from_before_the_opening_closes_nothing():
    bank = new_bank()
    old = visit(bank, "a", 0.0)
    trip(bank, "a", 0.1)
    visit(bank, "a", 30.1)

    assert bank.succeeded("a", old, 30.2) == ()
    assert bank.state("a", 30.2) is State.HALF_OPEN


def test_failures_from_before_the_opening_do_not_reopen_a_recovered_circuit():
    bank = new_bank(replace(ARTICLE, cooldown_s=1.0))
    hung = [visit(bank, "a", 0.0) for _ in range(20)]
    trip(bank, "a", 0.1)
    recover(bank, "a", 1.1)

    assert {bank.failed("a", TIMEOUT, ticket, 5.0) for ticket in hung} == {()}
    fresh = [bank.failed("a", TIMEOUT, visit(bank, "a", 5.0), 5.0) for _ in range(5)]
    assert fresh[-1] == (OPENED,)


def test_an_ejection_that_a_long_stream_met_before_the_recovery_does_not_reopen():
    bank = new_bank()
    streams_for_minutes = visit(bank, "a", 0.0)
    trip(bank, "a", 0.1)
    recover(bank, "a", 30.1)

    assert bank.ejected("a", streams_for_minutes, 180.0) == ()
    assert bank.ejected("a", visit(bank, "a", 180.0), 180.1) == (EJECTED,)


@pytest.mark.parametrize(
    ("skipped_at_s", "told_at_s"),
    [(1.0, 2.0), (1.0, 30.5), (1.0, 40.0), (30.0, 30.5), (30.0, 40.0)],
)
def test_what_the_gate_itself_skipped_is_no_ejection(skipped_at_s: float, told_at_s: float):
    bank = new_bank()
    trip(bank, "a", 0.0)
    ticket = bank.admit(("b", "a", "c"), skipped_at_s).ticket
    if told_at_s > 30.0:
        trial = visit(bank, "a", 30.0)
    if told_at_s > 31.0:
        bank.succeeded("a", trial, 31.0)

    assert ticket.trials == ()
    assert bank.ejected("a", ticket, told_at_s) == ()


@pytest.mark.parametrize("at_s", [30.2, 61.0], ids=["while_open", "in_the_next_half_open_period"])
def test_a_trial_that_succeeds_after_another_failed_closes_nothing(
    half_open: GateBank, at_s: float
):
    fails, succeeds = visit(half_open, "a", 30.0), visit(half_open, "a", 30.0)
    half_open.failed("a", TIMEOUT, fails, 30.1)
    half_open.admit(("a",), at_s)

    assert half_open.succeeded("a", succeeds, at_s) == ()


def test_a_trial_that_fails_after_another_succeeded_does_not_count():
    bank = new_bank(replace(ARTICLE, failure_threshold=1))
    trip(bank, "a", 0.0)
    succeeds, fails = visit(bank, "a", 30.0), visit(bank, "a", 30.0)
    bank.succeeded("a", succeeds, 30.1)

    assert bank.failed("a", TIMEOUT, fails, 30.2) == ()
    assert bank.failed("a", TIMEOUT, visit(bank, "a", 30.3), 30.3) == (OPENED,)


def test_transitions_of_other_upstreams_make_no_news_stale():
    bank = new_bank(replace(ARTICLE, failure_threshold=1))
    ticket = bank.admit(("a", "b"), 0.0).ticket
    trip(bank, "b", 0.1)

    assert bank.failed("a", TIMEOUT, ticket, 0.2) == (OPENED,)


@pytest.mark.parametrize(
    "ticket",
    [None, Ticket("r0", 0), Ticket("r0", 7, (Trial("a", 1),)), Ticket("r1", 7)],
    ids=["unreadable", "other_process", "trial_of_other_process", "future"],
)
def test_news_with_no_ticket_of_this_run_moves_nothing(ticket: Ticket | None):
    bank = new_bank(replace(ARTICLE, failure_threshold=1))

    assert bank.failed("a", TIMEOUT, ticket, 0.0) == ()
    assert bank.ejected("a", ticket, 0.0) == ()
    trip(bank, "a", 0.0)
    for _ in range(3):
        visit(bank, "a", 30.0)
    assert bank.succeeded("a", ticket, 30.0) == ()
    bank.abandoned("a", ticket)
    assert bank.admit(("a",), 30.0).skip == ("a",)


def test_an_upstream_without_a_circuit_is_never_skipped_and_its_news_ignored():
    bank = new_bank(replace(ARTICLE, failure_threshold=1))
    ticket = bank.admit(("gone",), 0.0).ticket

    assert bank.failed("gone", TIMEOUT, ticket, 0.0) == ()
    trip(bank, "a", 0.0)
    assert bank.admit(("gone", "a"), 0.0).skip == ("a",)


# --- chains ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "skip", "trials"),
    [
        # o open, h half-open, x half-open without a free token, - closed; for a, b, c
        ("---", "", ""),
        ("o--", "a", ""),
        ("-o-", "b", ""),
        ("ooo", "abc", ""),
        ("h--", "", "a"),
        ("x--", "a", ""),
        # Everything before it is skipped: tried for certain.
        ("oh-", "a", "b"),
        ("xh-", "a", "b"),
        ("ooh", "ab", "c"),
        # A closed one takes over: no token is spent on what will hardly be tried.
        ("-h-", "b", ""),
        ("--h", "c", ""),
        ("hh-", "b", "a"),
        ("h-h", "c", "a"),
        # Nothing else could take over: in reserve.
        ("-ho", "c", "b"),
        ("-oh", "b", "c"),
        ("hho", "c", "ab"),
        ("o-h", "a", "c"),
        # One reserve is enough.
        ("-hh", "c", "b"),
        ("hhh", "c", "ab"),
        ("-xh", "b", "c"),
        # Nothing is left: the rule answers at once.
        ("xxx", "abc", ""),
        ("oxo", "abc", ""),
        ("-xo", "bc", ""),
    ],
)
def test_who_is_skipped_and_who_is_on_trial(states: str, skip: str, trials: str):
    bank = new_bank()
    for upstream, state in zip(UPSTREAMS, states, strict=True):
        if state != "-":
            trip(bank, upstream, 30.0 if state == "o" else 0.0)
    for upstream, state in zip(UPSTREAMS, states, strict=True):
        for _ in range(3 if state == "x" else 0):
            visit(bank, upstream, 30.0)

    admission = bank.admit(UPSTREAMS, 30.0)

    assert "".join(admission.skip) == skip
    assert "".join(trial.upstream for trial in admission.ticket.trials) == trials


def test_reserves_leave_a_token_to_whom_tries_the_upstream_for_certain():
    bank = new_bank()
    trip(bank, "b", 0.0)

    reserves = [bank.admit(("a", "b"), 30.0).skip for _ in range(3)]

    assert reserves == [(), (), ("b",)]
    assert [bank.admit(("b", "a"), 30.0).skip for _ in range(2)] == [(), ("b",)]


def test_a_single_trial_is_never_held_in_reserve():
    bank = new_bank(replace(ARTICLE, half_open_max_requests=1))
    trip(bank, "b", 0.0)

    assert bank.admit(("a", "b"), 30.0).skip == ("b",)
    assert bank.admit(("b", "a"), 30.0).skip == ()


def test_a_reserve_that_was_not_needed_gives_its_token_back():
    bank = new_bank()
    trip(bank, "b", 0.0)

    for _ in range(100):
        admission = bank.admit(("a", "b"), 30.0)
        assert admission.skip == ()
        bank.succeeded("a", admission.ticket, 30.0)
        bank.abandoned("b", admission.ticket)


def test_a_fallback_recovers_by_one_failure_of_a_primary_that_stays_closed():
    bank = new_bank()
    trip(bank, "b", 0.0)
    ticket = bank.admit(("a", "b"), 30.0).ticket
    bank.failed("a", TIMEOUT, ticket, 35.0)

    (moved,) = bank.succeeded("b", ticket, 35.5)

    assert (moved.upstream, moved.after) == ("b", State.CLOSED)
    assert bank.state("a", 35.5) is State.CLOSED


def test_the_deadline_of_a_reserve_allows_for_the_upstream_before_it():
    bank = GateBank(ARTICLE, {"a": 6.0, "b": 9.0}, run="r1")
    trip(bank, "b", 0.0)
    for _ in range(2):
        bank.admit(("a", "b"), 30.0)

    assert bank.admit(("a", "b"), 44.999).skip == ("b",)
    assert bank.admit(("a", "b"), 45.0).skip == ()


def test_two_chains_that_share_an_upstream_see_one_circuit():
    bank = new_bank(replace(ARTICLE, failure_threshold=2, half_open_max_requests=1))
    one, other = ("a", "b"), ("c", "a")
    bank.failed("a", TIMEOUT, bank.admit(one, 0.0).ticket, 0.0)
    assert bank.failed("a", TIMEOUT, bank.admit(other, 0.0).ticket, 0.0) == (OPENED,)
    assert (bank.admit(one, 1.0).skip, bank.admit(other, 1.0).skip) == (("a",), ("a",))

    trial = bank.admit(("a",), 30.0).ticket
    assert (bank.admit(one, 30.0).skip, bank.admit(other, 30.0).skip) == (("a",), ("a",))
    bank.succeeded("a", trial, 30.1)
    assert (bank.admit(one, 30.2).skip, bank.admit(other, 30.2).skip) == ((), ())


def test_one_admission_can_end_the_cooldown_of_several_upstreams():
    bank = new_bank()
    for upstream in ("a", "b"):
        trip(bank, upstream, 0.0)

    admission = bank.admit(("a", "b"), 30.0)

    assert [moved.upstream for moved in admission.transitions] == ["a", "b"]
    (moved,) = bank.succeeded("a", admission.ticket, 30.1)  # not stale by b's own transition
    assert moved == CLOSED


# --- the ticket on the wire, and memory -----------------------------------------------------------

names = st.text(
    st.characters(codec="utf-8", exclude_characters=",:.", exclude_categories=["Z", "C"])
)
tickets = st.builds(
    Ticket,
    run=names.filter(bool),
    epoch=st.integers(0, 10**15 - 1),
    trials=st.lists(
        st.builds(Trial, upstream=names.filter(bool), serial=st.integers(0, 10**15 - 1)), max_size=3
    ).map(tuple),
)


@pytest.mark.parametrize(
    ("ticket", "text"),
    [
        (Ticket("r1", 0), "r1.0"),
        (Ticket("r1", 12, (Trial("primary", 3),)), "r1.12,primary:3"),
        (Ticket("r1", 12, (Trial("gpu-1.eu", 3), Trial("b", 4))), "r1.12,gpu-1.eu:3,b:4"),
    ],
)
def test_ticket_on_the_wire(ticket: Ticket, text: str):
    assert ticket.encode() == text
    assert Ticket.decode(text) == ticket


@given(tickets)
def test_every_ticket_survives_the_wire(ticket: Ticket):
    assert Ticket.decode(ticket.encode()) == ticket


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "r1",
        "r1.",
        ".1",
        "r1.-1",
        "r1.+1",
        "r1.1_0",
        "r1. 1",
        "r1.01",
        "r1.١",  # a digit to int(), not to us
        "r1.1\n",
        "r1.1,",
        "r1.1,a",
        "r1.1,a:",
        "r1.1,:1",
        "r1.1,a:x",
        "r1.1,a:1,",
        "r1.1,a:1:2",
        "r1.1,a b:1",
        "r1.1000000000000000",
        "r1." + "9" * 5000,
    ],
)
def test_malformed_ticket_is_none(text: str):
    assert Ticket.decode(text) is None


@given(st.text() | st.text("r1.,:a0 "))
def test_decoding_answers_a_ticket_that_encodes_to_the_same_text_or_none(text: str):
    ticket = Ticket.decode(text)

    assert ticket is None or ticket.encode() == text


@pytest.mark.parametrize(("run", "upstream"), [("r.1", "a"), ("", "a"), ("r1", "a,b"), ("r1", "")])
def test_a_name_that_cannot_travel_is_refused_at_once(run: str, upstream: str):
    with pytest.raises(ValueError, match="cannot travel"):
        GateBank(ARTICLE, {upstream: 1.0}, run=run)


def test_memory_is_bounded_whatever_arrives():
    bank = new_bank(replace(ARTICLE, window_s=0.5))  # failures a second apart never open
    for at in range(1000):
        bank.failed("a", TIMEOUT, visit(bank, "a", at), at)
        bank.failed(f"unknown-{at}", TIMEOUT, Ticket("r1", 0), at)
    trip(bank, "b", 0.0)
    for at in range(1000):  # every record lost
        for chain in (("b",), ("a", "b")):
            bank.admit(chain, 30.0 + at)

    assert set(bank._gates) == set(UPSTREAMS)
    assert len(bank._gates["a"].failures) <= ARTICLE.failure_threshold
    assert len(bank._gates["b"].tokens) <= ARTICLE.half_open_max_requests


# --- any order of events --------------------------------------------------------------------------


@dataclass
class Model:
    """One circuit as the policy words it: plain lists, nothing forgotten, periods instead of epochs."""

    state: State = State.CLOSED
    period: int = 0
    entered_s: float = 0.0
    failures: list[float] = field(default_factory=list)
    in_flight: dict[int, float] = field(default_factory=dict)  # visit -> when it must be over

    def enter(self, state: State, now_s: float) -> None:
        self.state, self.entered_s, self.failures = state, now_s, []
        self.period += 1

    def busy(self, now_s: float) -> int:
        return sum(until_s > now_s for until_s in self.in_flight.values())


@dataclass(frozen=True)
class Visit:
    """What one request may do at one upstream of its chain; a skipped one should do nothing."""

    key: int
    upstream: str
    ticket: str
    period: int
    on_trial: bool


POLICIES = [
    CircuitPolicy(failure_threshold=2, window_s=10, cooldown_s=1, half_open_max_requests=2),
    CircuitPolicy(failure_threshold=1, window_s=5, cooldown_s=20, half_open_max_requests=1),
    CircuitPolicy(failure_threshold=3, window_s=30, cooldown_s=3, half_open_max_requests=3),
]
CHAINS = [("a",), ("a", "b"), ("b", "a"), ("a", "b", "c")]


class AnyOrder(RuleBasedStateMachine):
    """Visits end in any order, more than once, or never; the clock may stand or leap."""

    visits = Bundle("visits")

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: CircuitPolicy) -> None:
        self.policy = policy
        self.bank = new_bank(policy)
        self.models: dict[str, Model] = defaultdict(Model)
        self.now_s = 0.0
        self.keys = 0

    @rule(seconds=st.sampled_from([0.02, 1.0, 3.0, TRIAL_TIMEOUT_S, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def cool_down(self, upstream: str) -> bool:
        model = self.models[upstream]
        over = self.now_s - model.entered_s >= self.policy.cooldown_s
        if model.state is State.OPEN and over:
            model.enter(State.HALF_OPEN, self.now_s)
            return True
        return False

    @rule(target=visits, chain=st.sampled_from(CHAINS), requests=st.sampled_from([1, 1, 4]))
    def admit(self, chain: tuple[str, ...], requests: int):
        return multiple(*(visit for _ in range(requests) for visit in self.admit_one(chain)))

    def admit_one(self, chain: tuple[str, ...]) -> list[Visit]:
        admission = self.bank.admit(chain, self.now_s)
        cooled = [upstream for upstream in chain if self.cool_down(upstream)]
        assert admission.transitions == tuple(
            Transition(name, State.OPEN, State.HALF_OPEN, Cause.COOLDOWN) for name in cooled
        )
        passed = [name for name in chain if name not in admission.skip]
        trials = {trial.upstream for trial in admission.ticket.trials}
        admitted = []
        for name in chain:
            model = self.models[name]
            assert name in passed or model.state is not State.CLOSED
            assert name in admission.skip or model.state is not State.OPEN
            assert (name in trials) == (name in passed and model.state is State.HALF_OPEN)
            self.keys += 1
            if name in trials:
                lead_s = TRIAL_TIMEOUT_S if name != passed[0] else 0.0
                model.in_flight[self.keys] = self.now_s + lead_s + TRIAL_TIMEOUT_S
            ticket = admission.ticket.encode()
            admitted.append(Visit(self.keys, name, ticket, model.period, name in trials))
        return admitted

    @rule(target=visits, upstream=st.sampled_from(["a", "b"]))
    def outage(self, upstream: str):
        """A short cut to the half-open state, where the interesting orders are."""
        (visit,) = self.admit_one((upstream,))
        self.eject(visit)
        self.now_s += self.policy.cooldown_s
        return visit

    def expect(self, visit: Visit, expected: Cause | None, moved: tuple[Transition, ...]) -> None:
        model = self.models[visit.upstream]
        model.in_flight.pop(visit.key, None)
        if expected is None:
            assert moved == ()
            return
        before = model.state
        after = State.CLOSED if expected is Cause.TRIAL_SUCCEEDED else State.OPEN
        assert moved == (Transition(visit.upstream, before, after, expected),)
        model.enter(after, self.now_s)

    @rule(visit=visits)
    def succeed(self, visit: Visit) -> None:
        model = self.models[visit.upstream]
        closes = visit.on_trial and visit.period == model.period and model.state is State.HALF_OPEN
        moved = self.bank.succeeded(visit.upstream, Ticket.decode(visit.ticket), self.now_s)
        self.expect(visit, Cause.TRIAL_SUCCEEDED if closes else None, moved)

    @rule(visit=visits, reason=st.sampled_from([TIMEOUT, TIMEOUT, FallbackReason.RATE_LIMITED]))
    def fail(self, visit: Visit, reason: FallbackReason) -> None:
        model = self.models[visit.upstream]
        cause = None
        if reason is TIMEOUT and visit.period == model.period:
            if model.state is State.HALF_OPEN:
                cause = Cause.TRIAL_FAILED if visit.on_trial else None
            elif model.state is State.CLOSED:
                model.failures.append(self.now_s)
                recent = [at for at in model.failures if self.now_s - at <= self.policy.window_s]
                cause = Cause.THRESHOLD if len(recent) >= self.policy.failure_threshold else None
        moved = self.bank.failed(visit.upstream, reason, Ticket.decode(visit.ticket), self.now_s)
        self.expect(visit, cause, moved)

    @rule(visit=visits)
    def eject(self, visit: Visit) -> None:
        model = self.models[visit.upstream]
        opens = visit.period == model.period and model.state is State.CLOSED
        moved = self.bank.ejected(visit.upstream, Ticket.decode(visit.ticket), self.now_s)
        self.expect(visit, Cause.EJECTED if opens else None, moved)

    @rule(visit=visits)
    def leave(self, visit: Visit) -> None:
        self.bank.abandoned(visit.upstream, Ticket.decode(visit.ticket))
        self.expect(visit, None, ())

    @rule(visit=visits, text=st.sampled_from(["", "r1", "r0.0,a:1", "r1.999999"]))
    def garble(self, visit: Visit, text: str) -> None:
        ticket = Ticket.decode(text)
        assert self.bank.succeeded(visit.upstream, ticket, self.now_s) == ()
        assert self.bank.failed(visit.upstream, TIMEOUT, ticket, self.now_s) == ()
        assert self.bank.ejected(visit.upstream, ticket, self.now_s) == ()

    @invariant()
    def never_more_trials_than_allowed(self) -> None:
        for model in self.models.values():
            assert model.busy(self.now_s) <= self.policy.half_open_max_requests

    @invariant()
    def states_agree(self) -> None:
        for upstream, model in self.models.items():
            cooled = self.now_s - model.entered_s >= self.policy.cooldown_s
            expected = State.HALF_OPEN if model.state is State.OPEN and cooled else model.state
            assert self.bank.state(upstream, self.now_s) is expected

    @invariant()
    def never_stuck(self) -> None:
        later_s = self.now_s + self.policy.cooldown_s + 2 * TRIAL_TIMEOUT_S
        for upstream in self.models:
            assert copy.deepcopy(self.bank).admit((upstream,), later_s).skip == ()

    @invariant()
    def a_free_token_is_never_refused(self) -> None:
        for upstream, model in self.models.items():
            if model.state is State.HALF_OPEN:
                free = model.busy(self.now_s) < self.policy.half_open_max_requests
                probe = copy.deepcopy(self.bank).admit((upstream,), self.now_s)
                assert (probe.skip == ()) is free


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)


# --- a look from outside ----------------------------------------------------------------------------


def test_view_tells_failures_in_the_window_then_what_is_left_of_the_cooldown() -> None:
    bank = new_bank()
    for now_s in (0.0, 20.0, 40.0):
        bank.failed("a", TIMEOUT, visit(bank, "a", now_s), now_s)
    assert bank.view("a", 41.0) == CircuitView(State.CLOSED, None, 2, 0)  # the first is forgotten
    trip(bank, "a", 50.0)
    assert bank.view("a", 60.0) == CircuitView(State.OPEN, 20.0, 0, 0)
    assert bank.view("a", 80.0) == CircuitView(State.HALF_OPEN, None, 0, 0)
    visit(bank, "a", 81.0)
    assert bank.view("a", 82.0).trials == 1
    assert bank.view("a", 81.0 + TRIAL_TIMEOUT_S).trials == 0  # lost


def test_view_moves_nothing() -> None:
    bank = new_bank()
    trip(bank, "a", 0.0)
    bank.view("a", 31.0)
    assert bank.admit(("a",), 32.0).transitions == (COOLED,)
