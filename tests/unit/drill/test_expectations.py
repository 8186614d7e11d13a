"""What must follow from a fault: held by a gateway that keeps the policy, and by no other."""

import dataclasses

import pytest

from extproc.core.circuit import State
from extproc.drill.events import Answered, Ended, Look, Totals, Visit
from extproc.drill.expectations import Verdict, expectations
from extproc.drill.plan import DrillFault
from extproc.drill.story import Story

OPENING = ["hang", "5xx", "refused", "reset", "bad_schema", "flaky"]


def judged(setting, events):
    return expectations(Story.of(setting, events))


def not_held(setting, events):
    return [each.name for each in judged(setting, events) if each.verdict is Verdict.NOT_HELD]


def edited(events, kind, **change):
    """Every event of a kind with some fields replaced, by a value or by what a function answers."""

    def edit(event):
        if not isinstance(event, kind):
            return event
        new = {key: value(event) if callable(value) else value for key, value in change.items()}
        return dataclasses.replace(event, **new)

    return [edit(event) for event in events]


@pytest.mark.parametrize("fault", OPENING)
def test_a_gateway_that_keeps_the_policy_holds_everything(drilled, fault):
    setting, events = drilled(fault)
    assert not_held(setting, events) == []
    measured = {each.name: each for each in judged(setting, events)}
    assert measured["the circuit opened"].values["after_s"] < 1.1
    assert measured["no request reached the broken upstream while it was open"].values["trials"]
    assert ("consecutive counting alone would never have opened it" in measured) == (
        fault == "flaky"
    )


def test_hang_is_measured(drilled):
    measured = {each.name: each.measured for each in judged(*drilled("hang"))}
    assert measured["at most 5 requests and those in flight waited"] == (
        "10 waited, 504 ms in the median, 504 ms at most: 5, 5 in flight"
    )
    assert measured["at most 3 trials at once"].startswith("3 at once, sent at 5.1, 5.2, 5.3")
    assert measured["no request reached the broken upstream while it was open"].endswith(
        "13 reached it while it was broken, 3 of them trials"
    )
    assert measured["each fallback was counted once, under the right reason"] == (
        "circuit_open 0 -> 63, timeout 0 -> 13"
    )


def test_a_circuit_that_never_opens_is_named_first(drilled):
    names = not_held(*drilled("hang", failure_threshold=1000))
    assert names[0] == "the circuit opened"
    assert "answers took milliseconds while it was open" in names
    assert "every request was answered" not in names


def test_a_circuit_that_opens_late_keeps_too_many_waiting(drilled):
    assert not_held(*drilled("5xx", failure_threshold=9)) == [
        "at most 5 requests and those in flight waited"
    ]


def test_a_short_cooldown_lets_requests_reach_the_broken_upstream(drilled):
    names = not_held(*drilled("hang", cooldown_s=0.6))
    assert "no request reached the broken upstream while it was open" in names


def test_too_many_trials_are_seen(drilled):
    assert not_held(*drilled("hang", half_open_max_requests=50)) == ["at most 3 trials at once"]


def test_no_cooldown_that_ends_is_no_recovery(drilled):
    names = not_held(*drilled("hang", cooldown_s=60.0))
    assert "traffic was back within 5.5 s of the mending, and stayed" in names
    assert "at most 3 trials at once" in names


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"status": 0, "ended": Ended.NOTHING}, "every request was answered"),
        ({"status": 503}, "every request was answered"),
        ({"ended": Ended.SHORT}, "every request was answered"),
    ],
)
def test_one_bad_answer_is_enough(drilled, change, name):
    setting, events = drilled("hang")
    victim = next(
        each for each in events if isinstance(each, Answered) and each.upstream == "vllm-fallback"
    )
    events[events.index(victim)] = dataclasses.replace(victim, **change)
    assert not_held(setting, events) == [name]


def test_a_lost_answer_is_no_answer(drilled):
    setting, events = drilled("5xx")
    lost = next(each for each in events if isinstance(each, Answered) and each.fallback)
    events.remove(lost)
    assert "every request was answered" in not_held(setting, events)


@pytest.mark.parametrize("by", [-1, 1])
def test_the_gateway_and_envoy_must_count_what_was_sent(drilled, by):
    setting, events = drilled("5xx")
    at_s = max(each.at_s for each in events if isinstance(each, Totals))

    def counted(each):
        return each.envoy_requests + (by if each.at_s == at_s else 0)

    assert not_held(setting, edited(events, Totals, envoy_requests=counted)) == [
        "every request was counted once"
    ]


def test_slow_answers_while_open_are_seen(drilled):
    setting, events = drilled("5xx")
    slow = edited(
        events,
        Answered,
        took_s=lambda each: 0.3 if each.fallback == "circuit_open" else each.took_s,
    )
    assert not_held(setting, slow) == ["answers took milliseconds while it was open"]


def test_a_busy_machine_is_no_broken_gate(drilled):
    setting, events = drilled("5xx")
    slow = edited(
        events,
        Answered,
        took_s=lambda each: 0.3 if each.fallback == "circuit_open" else each.took_s,
    )
    busy = edited(slow, Look, begun_s=lambda each: each.begun_s - 0.09)
    assert not_held(setting, busy) == []


def test_a_visit_that_only_the_upstream_tells_of_counts(drilled):
    """The gateway's own headers are not the last word."""
    setting, events = drilled("refused")
    skipped = [each for each in events if isinstance(each, Answered) and each.attempts]
    witness = next(each for each in skipped if each.sent_s == pytest.approx(3.0))
    events.append(Visit("primary", witness.serial, 3.0, "big"))
    assert not_held(setting, events) == ["no request reached the broken upstream while it was open"]


def test_a_fallback_under_another_reason_is_seen(drilled):
    setting, events = drilled("reset")

    def renamed(totals):
        return {each.replace("connect_error", "timeout"): n for each, n in totals.fallbacks.items()}

    assert not_held(setting, edited(events, Totals, fallbacks=renamed)) == [
        "each fallback was counted once, under the right reason"
    ]


def test_an_upstream_asked_for_another_model_is_seen(drilled):
    setting, events = drilled("hang")
    assert not_held(setting, edited(events, Visit, model="auto")) == [
        "each upstream was asked for its own model"
    ]


def test_consecutive_failures_would_have_been_envoys_work(drilled):
    setting, events = drilled("flaky")
    assert not_held(setting, edited(events, Totals, ejections=lambda each: int(each.at_s > 1))) == [
        "consecutive counting alone would never have opened it"
    ]


def test_cut_streams_open_nothing_and_never_look_complete(drilled):
    setting, events = drilled("cut_stream")
    assert not_held(setting, events) == []
    complete = edited(
        events,
        Answered,
        ended=lambda each: Ended.SHORT if each.serial == 20 else each.ended,
    )
    name = "no cut stream looked complete, and each was counted as stream_cut"
    assert not_held(setting, complete) == ["every request was answered", name]


def test_a_cut_stream_that_opens_the_circuit_is_seen(drilled):
    setting, events = drilled("cut_stream")
    opened = edited(
        events,
        Look,
        entered=lambda each: {**each.entered, State.OPEN: int(each.done_s > 3)},
    )
    assert not_held(setting, opened)[0] == "cut_stream did not open the circuit"


def test_slow_first_token_is_judged_by_what_is_configured(drilled):
    setting, events = drilled("slow_first_token")
    found = {each.name: each for each in judged(setting, events)}
    waited = found["first_token_timeout sends a silent stream on"]
    assert waited.verdict is Verdict.NOT_CONFIGURED
    assert waited.measured == "30 clients waited 1,500 ms for their first token"
    assert not_held(setting, events) == []

    limited = drilled("slow_first_token", first_token='first_token_timeout = "500ms"')
    assert not_held(*limited) == []
    assert "the circuit opened" in {each.name for each in judged(*limited)}


def test_an_error_that_is_not_counted_opens_nothing(drilled, setting_of):
    setting, _ = drilled("bad_schema")
    uncounted = dataclasses.replace(
        setting.policy, counted_errors=setting.policy.counted_errors - {"bad_schema"}
    )
    setting = dataclasses.replace(setting, policy=uncounted)
    assert setting.fault is DrillFault.BAD_SCHEMA
    assert not setting.opens
    _, events = drilled("bad_schema", counted_errors=uncounted.counted_errors)
    names = [each.name for each in judged(setting, events)]
    assert "the circuit stayed closed: counted_errors has no bad_schema" in names
