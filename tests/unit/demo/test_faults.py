"""The fault switch: what hits which request, and which faults are refused."""

import pytest

from extproc.demo.faults import Fault, FaultKind, FaultSwitch, describe, parse_fault


def hits(switch: FaultSwitch, requests: int) -> list[bool]:
    return [switch.take(now_s=0.0) is not None for _ in range(requests)]


def test_no_fault_hits_nothing():
    assert hits(FaultSwitch(), 3) == [False, False, False]


def test_fault_lasts_until_it_is_cleared():
    switch = FaultSwitch()
    switch.set(Fault(kind=FaultKind.HANG), now_s=0.0)
    assert hits(switch, 3) == [True, True, True]
    switch.set(None, now_s=0.0)
    assert hits(switch, 1) == [False]


def test_times_counts_the_requests_harmed():
    switch = FaultSwitch()
    switch.set(Fault(kind=FaultKind.RESET, times=2), now_s=0.0)
    assert hits(switch, 4) == [True, True, False, False]
    assert switch.current(now_s=0.0) is None


def test_for_s_ends_the_fault_at_its_time():
    switch = FaultSwitch()
    switch.set(Fault(kind=FaultKind.HANG, for_s=5), now_s=100.0)
    assert switch.take(now_s=104.9) is not None
    assert switch.take(now_s=105.0) is None


def test_a_new_fault_does_not_inherit_the_end_of_the_last():
    switch = FaultSwitch()
    switch.set(Fault(kind=FaultKind.HANG, for_s=5), now_s=100.0)
    switch.set(Fault(kind=FaultKind.RESET), now_s=101.0)
    assert switch.take(now_s=1000.0) is not None


def test_flaky_fails_the_first_of_every_n():
    switch = FaultSwitch()
    switch.set(Fault(kind=FaultKind.FLAKY, fail=2, of=3), now_s=0.0)
    assert hits(switch, 7) == [True, True, False, True, True, False, True]


def test_flaky_times_counts_failures_not_requests():
    switch = FaultSwitch()
    switch.set(Fault(kind=FaultKind.FLAKY, fail=1, of=2, times=2), now_s=0.0)
    assert hits(switch, 6) == [True, False, True, False, False, False]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "'kind' must be one of hang, 5xx, refused"),
        ([], "'kind' must be one of"),
        ({"kind": "hung"}, "'kind' must be one of"),
        ({"kind": ["hang"]}, "'kind' must be one of"),
        ({"kind": "hang", "time": 2}, "unknown field `time`"),
        ({"kind": "hang", "status": 500}, "hang takes no 'status'; it takes for_s, times"),
        ({"kind": "5xx", "status": 200}, "`int` >= 400"),
        ({"kind": "hang", "times": 0}, "`int` >= 1"),
        ({"kind": "slow_headers", "delay_s": -1}, "`float` > 0"),
        ({"kind": "flaky", "fail": 3, "of": 2}, "cannot fail 3 of every 2"),
        ({"kind": "refused", "times": 2}, "use for_s instead of times"),
        ({"kind": "bad_schema", "variant": "xml"}, "variant"),
    ],
)
def test_bad_fault_is_refused_with_a_reason(document, says):
    with pytest.raises(ValueError) as refused:
        parse_fault(document)
    assert says in str(refused.value)


def test_description_parses_back_to_the_same_fault():
    fault = Fault(kind=FaultKind.SERVER_ERROR, status=429, retry_after_s=2, times=3)
    assert describe(fault) == {"kind": "5xx", "status": 429, "retry_after_s": 2, "times": 3}
    assert parse_fault(describe(fault)) == fault
    assert describe(None) is None
