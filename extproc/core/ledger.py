"""What Envoy counted against what the sidecar counted, and the difference that is certain; no I/O.

Theory of operation. Envoy's counters and our records say the same thing at different times: a record
arrives some milliseconds after its request ended, and never if the sidecar was dead. So a plain
difference is never exact under traffic. But a record that was due at one reading has arrived by the
next, or it never will:

    lost >= Envoy's total at a reading - what we have counted by the NEXT reading

That bound never overstates the loss, and it is exact as soon as nothing ends between two readings.
Both sides are per Envoy process (`epoch`): its counters begin at 0 with it, ours with the sidecar.
What earlier runs of the sidecar had counted comes back from a file (`earlier`), and what belongs to
Envoys that are gone is left out (`before`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Reading:
    """Envoy's counters at one moment."""

    epoch: str
    """Which Envoy process; changes with every start."""
    started: int
    """Requests that reached the listener."""
    active: int
    """Of them, those still under way: their records are not due."""
    let_through: int
    """Requests that ext_proc let pass undecided (`failure_mode_allowed`)."""
    records: int
    """Access log records written, requests and attempts."""

    @property
    def ended(self) -> int:
        return self.started - self.active


@dataclass(frozen=True, slots=True)
class Tally:
    """Our side of the same three numbers, in records that arrived."""

    requests: int = 0
    let_through: int = 0
    records: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.requests + other.requests,
            self.let_through + other.let_through,
            self.records + other.records,
        )

    def __sub__(self, other: Tally) -> Tally:
        return Tally(
            self.requests - other.requests,
            self.let_through - other.let_through,
            self.records - other.records,
        )


class UnseenCause(StrEnum):
    """Why a request that Envoy counted has no record here."""

    BYPASSED = "bypassed"
    """The sidecar was dead: Envoy sent it down the default chain, and nobody was there for its record."""
    RECORD_LOST = "record_lost"
    """Decided or refused like any other, but its record found nobody."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one reading adds to the certain losses."""

    bypassed: int = 0
    record_lost: int = 0
    records: int = 0


class Ledger:
    """Mutable state: all fields. One Envoy process at a time; `received` only grows."""

    def __init__(self, *, stored_epoch: str = "", stored: Tally | None = None) -> None:
        """`stored`: what earlier runs of the sidecar had accounted for under `stored_epoch`."""
        self.epoch = ""
        self.received = Tally()
        self._stored_epoch = stored_epoch
        self._earlier = stored or Tally()
        self._before = Tally()
        self._lost_before = Tally()
        self._silence = Tally()
        self._bypassed = 0
        self._record_lost = 0
        self._records_lost = 0
        self._last: tuple[Reading, Tally] | None = None

    def record(self, *, is_request: bool, let_through: bool) -> None:
        self.received += Tally(int(is_request), int(let_through), 1)

    def passed_on(self) -> None:
        """The sidecar itself answered `unchanged`: Envoy will report a bypass it did not allow."""
        self.received -= Tally(let_through=1)

    def fell_silent(self) -> None:
        """The last log stream ended: if Envoy is gone, all received so far was that Envoy's."""
        self._silence = self.received

    @property
    def accounted(self) -> Tally:
        """Of the running Envoy, earlier runs and certain losses included: what a restart must know."""
        return self._counted + self._lost

    @property
    def offset(self) -> Tally:
        """Add it to this run's own counters, and they compare with the running Envoy's."""
        return self._earlier - self._before - self._lost_before

    @property
    def _counted(self) -> Tally:
        return self.received + self._earlier - self._before

    @property
    def _lost(self) -> Tally:
        return Tally(self._bypassed + self._record_lost, self._bypassed, self._records_lost)

    def forget_reading(self) -> None:
        """We stood still since the last one: what it says is due may still lie in the socket."""
        self._last = None

    def read(self, reading: Reading) -> Found:
        """Take in a reading; call it no sooner after the last one than a record can travel."""
        if reading.epoch != self.epoch:
            self._begin(reading.epoch)
        counted = self._counted
        found = Found() if self._last is None else self._certain(*self._last, reading, counted)
        self._bypassed += found.bypassed
        self._record_lost += found.record_lost
        self._records_lost += found.records
        self._last = (reading, counted)
        return found

    def _begin(self, epoch: str) -> None:
        if self.epoch:  # Envoy was replaced under our eyes
            self._before = self._silence
            self._lost_before += self._lost
            self._earlier = Tally()
        elif epoch != self._stored_epoch:
            self._earlier = Tally()
        self.epoch = epoch
        self._last = None
        self._bypassed = self._record_lost = self._records_lost = 0

    def _certain(self, then: Reading, counted_then: Tally, now: Reading, counted: Tally) -> Found:
        unseen = then.ended - counted.requests
        # Those still under way may all be bypassed ones whose records are yet to come.
        bypassed = min(then.let_through - then.active - counted.let_through, unseen)
        # And at most so many of the unseen ones can have been bypassed.
        at_most_bypassed = max(now.let_through - counted_then.let_through, 0)
        return Found(
            bypassed=max(bypassed - self._bypassed, 0),
            record_lost=max(unseen - at_most_bypassed - self._record_lost, 0),
            records=max(then.records - counted.records - self._records_lost, 0),
        )
