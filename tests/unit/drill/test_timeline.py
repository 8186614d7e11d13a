"""The rows that a watcher sees, in order, and that no request is left out or told of twice."""

import re

import pytest

from extproc.core.circuit import State
from extproc.drill.events import Answered, Ended, Look, Made, Sent
from extproc.drill.timeline import Timeline, timeline


def counted(rows):
    """Requests that the rows tell of."""
    found = (re.match(r"(\d+) (requests?|trials?) ", row.text) for row in rows)
    return sum(int(each[1]) for each in found if each)


def answered(serial, sent_s, took_s=0.004, **more):
    values = {"status": 200, "ended": Ended.WHOLE, "upstream": "vllm-primary", **more}
    values.setdefault("attempts", "vllm-primary:200")
    return Answered(serial=serial, sent_s=sent_s, done_s=sent_s + took_s, took_s=took_s, **values)


def test_a_hang_reads_like_a_story(drilled):
    rows = [f"{row.at_s:.1f} {row.text}" for row in timeline(*drilled("hang"))]
    assert rows == [
        "1.1 11 requests answered by vllm-primary in 4.0 ms (p99 4.0 ms) (sent at 0.0 to 1.0 s)",
        "1.1 hang made on vllm-primary",
        "2.1 circuit of vllm-primary OPEN after 5 failures",
        (
            "2.5 10 requests waited 504 ms (p99 504 ms), then vllm-fallback answered: timeout"
            " (sent at 1.1 to 2.0 s)"
        ),
        (
            "5.1 30 requests answered by vllm-fallback in 4.0 ms (p99 4.0 ms): circuit_open"
            " (sent at 2.1 to 5.0 s)"
        ),
        "5.1 circuit of vllm-primary half-open: the cooldown is over; at most 3 trials at once",
        "5.6 1 trial waited 504 ms, then vllm-fallback answered: timeout (sent at 5.1 s)",
        (
            "5.7 3 requests answered by vllm-fallback in 4.0 ms (p99 4.0 ms): circuit_open"
            " (sent at 5.4 to 5.6 s)"
        ),
        "5.7 circuit of vllm-primary open again: a trial failed; next trials in 3 s",
        (
            "5.8 2 trials waited 504 ms (p99 504 ms), then vllm-fallback answered: timeout"
            " (sent at 5.2 to 5.3 s)"
        ),
        (
            "6.7 10 requests answered by vllm-fallback in 4.0 ms (p99 4.0 ms): circuit_open"
            " (sent at 5.7 to 6.6 s)"
        ),
        "6.7 vllm-primary mended",
        (
            "8.7 20 requests answered by vllm-fallback in 4.0 ms (p99 4.0 ms): circuit_open"
            " (sent at 6.7 to 8.6 s)"
        ),
        "8.7 circuit of vllm-primary half-open: the cooldown is over; at most 3 trials at once",
        "8.7 1 trial answered by vllm-primary in 4.0 ms (sent at 8.7 s)",
        "8.8 circuit of vllm-primary CLOSED: a trial succeeded; traffic is back",
        "9.7 10 requests answered by vllm-primary in 4.0 ms (p99 4.0 ms) (sent at 8.8 to 9.7 s)",
    ]


@pytest.mark.parametrize("fault", ["hang", "5xx", "flaky", "cut_stream", "slow_first_token"])
def test_every_request_is_told_of_exactly_once(drilled, fault):
    setting, events = drilled(fault)
    assert counted(timeline(setting, events)) == sum(isinstance(e, Answered) for e in events)


def test_rows_come_in_the_order_of_their_times(drilled):
    times = [row.at_s for row in timeline(*drilled("hang"))]
    assert times == sorted(times)


def test_what_met_the_open_circuit_before_a_look_saw_it_is_told_behind_it(setting_of):
    entered = dict.fromkeys(State, 0)
    events = [
        Look(0.0, 0.0, State.CLOSED, entered),
        Sent(0, 0.1),
        answered(0, 0.1, upstream="vllm-fallback", fallback="circuit_open", attempts=""),
        Look(0.2, 0.2, State.OPEN, {**entered, State.OPEN: 1}),
    ]
    opened, skipped = timeline(setting_of("hang"), events)
    assert "OPEN after 0 failures" in opened.text
    assert skipped.text.startswith("1 request answered by vllm-fallback")


def test_a_long_quiet_part_shows_life_every_ten_seconds(setting_of):
    lines = Timeline(setting_of("hang"))
    rows = []
    for serial in range(250):
        rows += lines.feed(Sent(serial, serial / 10))
        rows += lines.feed(answered(serial, serial / 10))
    assert [row.at_s for row in rows] == [10.0, 20.0]
    assert counted(rows + lines.close(25.0)) == 250


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"ended": Ended.BROKEN}, "broke off at vllm-primary after 4.0 ms, as the clients could"),
        ({"ended": Ended.SHORT}, "ended like answers of vllm-primary after 4.0 ms and were none"),
        ({"ended": Ended.NOTHING, "status": 0, "upstream": ""}, "got no answer in 4.0 ms"),
        ({"status": 503, "upstream": ""}, "got status 503 from Envoy in 4.0 ms"),
    ],
)
def test_whatever_went_wrong_is_told(setting_of, more, text):
    rows = timeline(
        setting_of("cut_stream"), [Made(0.9, 1.0), Sent(0, 1.1), answered(0, 1.1, **more)]
    )
    assert text in rows[-1].text
