"""A story -> what had to follow from the fault, each held or not, with the measured value; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Final

from extproc.core.accounts import hops
from extproc.core.circuit import State
from extproc.core.errors import FallbackReason, Outcome
from extproc.drill.events import Ended
from extproc.drill.plan import DrillFault
from extproc.drill.story import NOTICE_S, Story, failure, most_at_once, percentile
from extproc.drill.words import many, ms

OPEN_P99_S: Final = 0.25
"""Generous, since it is usually a few milliseconds; and what a look at the metrics took meanwhile
comes on top, so that a busy machine does not pass for a broken gate."""


class Verdict(StrEnum):
    HELD = "held"
    NOT_HELD = "NOT HELD"
    NOT_CONFIGURED = "not configured"
    """The gateway was not told to do this; what happened instead is shown."""


@dataclass(frozen=True, slots=True)
class Expectation:
    name: str
    verdict: Verdict
    measured: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for machines."""


def expectations(story: Story) -> list[Expectation]:
    """In the order in which a reader would ask."""
    return list(_all(story))


def _all(story: Story) -> Iterator[Expectation]:
    setting = story.setting
    yield _healthy(story)
    yield _answered(story)
    yield _counted(story)
    if setting.opens:
        yield _opened(story)
        yield _waited(story)
        yield _fast_while_open(story)
        yield _unreached_while_open(story)
        yield _trials(story)
        yield _reopened(story)
    else:
        yield _stayed_closed(story)
    if setting.fault is DrillFault.FLAKY and setting.opens and not setting.max_retries:
        yield _not_by_envoy(story)
    if setting.fault is DrillFault.SLOW_FIRST_TOKEN and setting.first_token_timeout_s is None:
        yield _waited_for_first_token(story)
    if setting.fault is DrillFault.CUT_STREAM:
        yield _cut_streams(story)
    yield _back(story)
    yield _reasons(story)
    yield _models(story)


def _verdict(held: object) -> Verdict:
    return Verdict.HELD if held else Verdict.NOT_HELD


def _healthy(story: Story) -> Expectation:
    calm, name = story.calm, story.setting.name
    well = [each for each in calm if each.upstream == name and each.ended is Ended.WHOLE]
    return Expectation(
        f"{name} answered before the fault",
        _verdict(calm and len(well) == len(calm)),
        f"{len(well)} of {len(calm)}",
        {"answered": len(well), "of": len(calm)},
    )


def _answered(story: Story) -> Expectation:
    """A cut stream is the one answer that may stay unfinished: its provider had begun it."""
    allowed = {Ended.WHOLE}
    if story.setting.fault is DrillFault.CUT_STREAM:
        allowed.add(Ended.BROKEN)
    well = [each for each in story.answers if each.status == 200 and each.ended in allowed]
    statuses = Counter(str(each.status or "no response") for each in story.answers)
    endings = Counter(each.ended for each in story.answers if each.ended is not Ended.WHOLE)
    told = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    not_whole = "".join(f", {count} {ending}" for ending, count in sorted(endings.items()))
    return Expectation(
        "every request was answered",
        _verdict(story.sent and len(well) == len(story.sent)),
        f"{len(story.sent)} sent: {told}{not_whole}",
        {"sent": len(story.sent), "statuses": dict(statuses), "not_whole": dict(endings)},
    )


def _counted(story: Story) -> Expectation:
    sent = len(story.sent)
    requests = story.after.requests - story.before.requests
    envoy = story.after.envoy_requests - story.before.envoy_requests
    return Expectation(
        "every request was counted once",
        _verdict(sent == requests == envoy),
        f"{sent} sent, {requests} in pointsman_requests_total, {envoy} in Envoy's downstream_rq_total",
        {"sent": sent, "pointsman_requests_total": requests, "downstream_rq_total": envoy},
    )


def _opened(story: Story) -> Expectation:
    name, opened = "the circuit opened", story.opened
    failures = len(story.failures)
    if opened is None:
        watched_s = story.mended.begun_s - story.made.done_s
        measured = f"still closed {watched_s:.1f} s and {failures} failures after the fault"
        return Expectation(name, Verdict.NOT_HELD, measured, {"failures": failures})
    after_s = opened.hi_s - story.made.done_s
    return Expectation(
        name, Verdict.HELD, f"{after_s:.2f} s after the fault", {"after_s": round(after_s, 3)}
    )


def _waited(story: Story) -> Expectation:
    threshold = story.setting.policy.failure_threshold
    name = f"at most {many(threshold, 'request')} and those in flight waited"
    waited = story.waited
    took_s = [each.took_s for each in waited]
    values: dict[str, Any] = {"waited": len(waited)}
    told = f"{len(waited)} waited"
    if took_s:
        median_s, most_s = percentile(took_s, 0.5), max(took_s)
        values |= {"median_ms": _ms(median_s), "max_ms": _ms(most_s)}
        told += f", {ms(median_s)} in the median, {ms(most_s)} at most"
    if story.opened is None or len(waited) < threshold:
        return Expectation(name, Verdict.NOT_HELD, f"{told}; {_why_not(story)}", values)
    enough_s = waited[threshold - 1].done_s
    in_flight = sum(each.sent_s <= enough_s < each.done_s for each in waited)
    late = [each for each in waited if each.sent_s > enough_s + NOTICE_S]
    since = len(waited) - threshold - in_flight
    values |= {"failure_threshold": threshold, "in_flight": in_flight, "since": since}
    told += f": {threshold}, {in_flight} in flight"
    if since:
        told += f", {since} sent since"
    return Expectation(name, _verdict(not late), told, values)


def _why_not(story: Story) -> str:
    return "it never opened" if story.opened is None else "it opened for another reason"


def _fast_while_open(story: Story) -> Expectation:
    name = "answers took milliseconds while it was open"
    took_s = [each.took_s for each in story.while_open]
    if not took_s:
        why = "it never opened" if story.opened is None else "no request was sent then"
        return Expectation(name, Verdict.NOT_HELD, why)
    p50_s, p99_s = percentile(took_s, 0.5), percentile(took_s, 0.99)
    looks_s = [
        each.done_s - each.begun_s for each in story.looks if story.surely_open(each.begun_s)
    ]
    limit_s = OPEN_P99_S + (percentile(looks_s, 0.99) if looks_s else 0.0)
    return Expectation(
        name,
        _verdict(p99_s < limit_s),
        f"p50 {ms(p50_s)}, p99 {ms(p99_s)} of {len(took_s)} requests (limit {ms(limit_s)})",
        {
            "requests": len(took_s),
            "p50_ms": _ms(p50_s),
            "p99_ms": _ms(p99_s),
            "limit_ms": _ms(limit_s),
        },
    )


def _unreached_while_open(story: Story) -> Expectation:
    name = "no request reached the broken upstream while it was open"
    if story.opened is None:
        return Expectation(name, Verdict.NOT_HELD, "it never opened")
    reached = story.reached
    wrongly = [each for each in reached if story.surely_open(each.sent_s)]
    trials = set(story.trials).intersection(reached)
    return Expectation(
        name,
        _verdict(story.while_open and not wrongly),
        f"{len(wrongly)} of {len(story.while_open)}; {len(reached)} reached it while it was broken,"
        f" {len(trials)} of them trials",
        {
            "wrongly": len(wrongly),
            "while_open": len(story.while_open),
            "reached": len(reached),
            "trials": len(trials),
        },
    )


def _trials(story: Story) -> Expectation:
    limit = story.setting.policy.half_open_max_requests
    name = f"at most {many(limit, 'trial')} at once"
    if not story.trials:
        why = "it never opened" if story.opened is None else "no trial was made"
        return Expectation(name, Verdict.NOT_HELD, why)
    most = most_at_once(story.trials)
    at = ", ".join(f"{each.sent_s:.1f}" for each in story.trials)
    return Expectation(
        name,
        _verdict(most <= limit),
        f"{most} at once, sent at {at} s",
        {"at_once": most, "sent_s": [round(each.sent_s, 3) for each in story.trials]},
    )


def _reopened(story: Story) -> Expectation:
    name = "a failed trial opened it again"
    failed = [each for each in story.trials if failure(each, story.setting.name) is not None]
    opened = [each for each in story.transitions if each.after is State.OPEN]
    if not failed or len(opened) < 2:
        why = "it never opened" if story.opened is None else f"{len(failed)} trials failed"
        return Expectation(name, Verdict.NOT_HELD, f"{why}, opened {len(opened)} times")
    after_s = opened[1].hi_s - failed[0].sent_s
    return Expectation(
        name,
        Verdict.HELD,
        f"{after_s:.2f} s after the trial was sent",
        {"after_s": round(after_s, 3)},
    )


def _stayed_closed(story: Story) -> Expectation:
    setting = story.setting
    if setting.reason is None:
        name = f"{setting.fault} did not open the circuit"
    else:
        name = f"the circuit stayed closed: counted_errors has no {setting.reason}"
    moved = [each for each in story.transitions if each.hi_s > story.made.begun_s]
    return Expectation(
        name,
        _verdict(not moved),
        f"{len(moved)} transitions in {story.mended.begun_s - story.made.done_s:.1f} s",
        {"transitions": [each.after.value for each in moved]},
    )


def _not_by_envoy(story: Story) -> Expectation:
    """4 failures and a success, repeated: only a window sees the fifth failure."""
    ejections = story.after.ejections - story.before.ejections
    return Expectation(
        "consecutive counting alone would never have opened it",
        _verdict(not ejections),
        f"{ejections} ejections by Envoy",
        {"ejections": ejections},
    )


def _waited_for_first_token(story: Story) -> Expectation:
    took_s = [each.took_s for each in story.broken if each.upstream == story.setting.name]
    measured = "nobody was asked to wait"
    if took_s:
        measured = (
            f"{len(took_s)} clients waited {ms(percentile(took_s, 0.5))} for their first token"
        )
    return Expectation(
        "first_token_timeout sends a silent stream on",
        Verdict.NOT_CONFIGURED,
        measured,
        {"waited": len(took_s)},
    )


def _cut_streams(story: Story) -> Expectation:
    """Their outcome is the gateway's word for it, their ending the client's."""
    broken = [each for each in story.broken if each.upstream == story.setting.name]
    cut = [each for each in story.answers if each.ended is Ended.BROKEN]
    complete = [each for each in broken if each.ended is not Ended.BROKEN]
    outcome = Outcome.STREAM_CUT.value
    counted = story.after.outcomes.get(outcome, 0) - story.before.outcomes.get(outcome, 0)
    return Expectation(
        "no cut stream looked complete, and each was counted as stream_cut",
        _verdict(cut and not complete and len(cut) == counted),
        f"{len(cut)} were cut, {len(complete)} looked complete, {counted} counted",
        {"cut": len(cut), "looked_complete": len(complete), "counted": counted},
    )


def _back(story: Story) -> Expectation:
    limit_s = story.setting.back_within_s
    name = f"traffic was back within {limit_s:g} s of the mending, and stayed"
    back, recovered = story.back, story.recovered
    if back is None:
        return Expectation(name, Verdict.NOT_HELD, "it never came back")
    after_s = back.done_s - story.mended.done_s
    by_it = [each for each in recovered if each.upstream == story.setting.name]
    well = [each for each in by_it if each.ended is Ended.WHOLE]
    closed = story.closed is not None or story.opened is None
    told = f"{after_s:.2f} s after, then {len(well)} of {len(recovered)} requests"
    if not closed:
        told += "; the circuit did not close"
    return Expectation(
        name,
        _verdict(closed and recovered and len(well) == len(recovered) and after_s <= limit_s),
        told,
        {"after_s": round(after_s, 3), "answered": len(well), "of": len(recovered)},
    )


def _reasons(story: Story) -> Expectation:
    setting = story.setting
    before, after = story.before.fallbacks, story.after.fallbacks
    counted = {each: after.get(each, 0) - before.get(each, 0) for each in {*before, *after}}
    counted = {reason: count for reason, count in sorted(counted.items()) if count}
    told = Counter(
        hop.reason.value
        for hop in chain.from_iterable(hops(each.attempts) for each in story.answers)
        if hop.source == setting.name
    )
    wanted = {setting.reason.value} if setting.reason else set[str]()
    if setting.opens:
        wanted.add(FallbackReason.CIRCUIT_OPEN.value)
    return Expectation(
        "each fallback was counted once, under the right reason",
        _verdict(counted == dict(told) and counted.keys() == wanted),
        ", ".join(_grown(before, after, each) for each in counted) or "no fallback",
        {"before": dict(before), "after": dict(after), "told_to_clients": dict(told)},
    )


def _models(story: Story) -> Expectation:
    models = story.setting.models
    seen = Counter((each.upstream, each.model or "none") for each in story.visits)
    right = all(models.get(upstream) == model for upstream, model in seen)
    told = ", ".join(f"{upstream} {count} x {model}" for (upstream, model), count in seen.items())
    return Expectation(
        "each upstream was asked for its own model",
        _verdict(seen and right),
        told or "no upstream was asked",
        {"seen": [[*key, count] for key, count in seen.items()]},
    )


def _grown(before: Mapping[str, int], after: Mapping[str, int], reason: str) -> str:
    return f"{reason} {before.get(reason, 0)} -> {after.get(reason, 0)}"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
