"""The account closes exactly when nothing moves, and is never overstated while things do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.ledger import Found, Ledger, Reading, Tally


def reading(
    started: int = 0,
    *,
    active: int = 0,
    let_through: int = 0,
    records: int | None = None,
    epoch: str = "e1",
) -> Reading:
    return Reading(epoch, started, active, let_through, started if records is None else records)


def receive(ledger: Ledger, count: int, *, bypassed: bool = False) -> None:
    for _ in range(count):
        ledger.record(is_request=True, let_through=bypassed)


def test_what_was_due_and_came_is_no_loss() -> None:
    ledger = Ledger()
    assert ledger.read(reading(5)) == Found()
    receive(ledger, 5)
    assert ledger.read(reading(5)) == Found()
    assert ledger.accounted == Tally(5, 0, 5)


def test_what_was_due_and_did_not_come_by_the_next_reading_is_lost_once() -> None:
    ledger = Ledger()
    ledger.read(reading(10, let_through=4))
    receive(ledger, 3)
    assert ledger.read(reading(10, let_through=4)) == Found(bypassed=4, record_lost=3, records=7)
    assert ledger.read(reading(10, let_through=4)) == Found()
    assert ledger.accounted == Tally(10, 4, 10)


def test_requests_under_way_are_not_due() -> None:
    ledger = Ledger()
    ledger.read(reading(10, active=10, let_through=10, records=0))
    assert ledger.read(reading(10, active=10, let_through=10, records=0)) == Found()


def test_restarted_sidecar_knows_what_its_predecessor_had_counted() -> None:
    ledger = Ledger(stored_epoch="e1", stored=Tally(100, 2, 150))
    ledger.read(reading(130, let_through=32, records=200))
    found = ledger.read(reading(130, let_through=32, records=200))
    assert found == Found(bypassed=30, record_lost=0, records=50)
    assert ledger.offset == Tally(100, 2, 150)


def test_account_of_another_envoy_is_not_taken_over() -> None:
    ledger = Ledger(stored_epoch="e0", stored=Tally(100, 2, 150))
    ledger.read(reading(3))
    receive(ledger, 3)
    assert ledger.read(reading(3)) == Found()
    assert ledger.offset == Tally()


def test_replaced_envoy_begins_at_what_came_after_its_predecessors_streams_ended() -> None:
    ledger = Ledger()
    ledger.read(reading(20))
    receive(ledger, 18)
    ledger.read(reading(20))
    assert ledger.accounted.requests == 20
    ledger.fell_silent()
    receive(ledger, 4)
    ledger.read(reading(5, epoch="e2"))
    assert ledger.read(reading(5, epoch="e2")) == Found(record_lost=1, records=1)
    assert ledger.accounted == Tally(5, 0, 5)


def test_standing_still_makes_the_last_reading_worthless() -> None:
    ledger = Ledger()
    ledger.read(reading(5))
    ledger.forget_reading()
    assert ledger.read(reading(5)) == Found()
    assert ledger.read(reading(5)) == Found(record_lost=5, records=5)


def test_own_fault_is_no_bypass_of_envoys() -> None:
    ledger = Ledger()
    ledger.passed_on()
    receive(ledger, 1, bypassed=True)
    ledger.read(reading(1))
    ledger.read(reading(1))
    assert ledger.accounted == Tally(1, 0, 1)


step = st.tuples(
    st.integers(0, 5),  # requests that begin, decided
    st.integers(0, 5),  # requests that begin, bypassed
    st.booleans(),  # whether the sidecar is there for the records
)


@given(st.lists(step, max_size=30))
def test_loss_is_never_overstated_and_exact_at_rest(steps: list[tuple[int, int, bool]]) -> None:
    """Each request begins before one reading and ends before the next."""
    ledger = Ledger()
    started = let_through = ended = lost_decided = lost_bypassed = 0
    under_way = (0, 0)
    found_bypassed = found_lost = 0
    for decided, bypassed, is_there in [*steps, (0, 0, True), (0, 0, True), (0, 0, True)]:
        if is_there:
            receive(ledger, under_way[0])
            receive(ledger, under_way[1], bypassed=True)
        else:
            lost_decided += under_way[0]
            lost_bypassed += under_way[1]
        ended += sum(under_way)
        under_way = (decided, bypassed)
        started += decided + bypassed
        let_through += bypassed
        found = ledger.read(
            reading(started, active=started - ended, let_through=let_through, records=ended)
        )
        found_bypassed += found.bypassed
        found_lost += found.record_lost
        assert found_bypassed <= lost_bypassed
        assert found_lost <= lost_decided
    assert (found_bypassed, found_lost) == (lost_bypassed, lost_decided)
    assert ledger.accounted == Tally(started, let_through, started)
