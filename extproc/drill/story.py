"""Events -> what happened: transitions, who waited, what reached the broken upstream; it judges nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Final

from extproc.core.circuit import State
from extproc.core.errors import FallbackReason
from extproc.drill.events import (
    Answered,
    Event,
    Look,
    Made,
    Mended,
    Sent,
    Totals,
    Visit,
)
from extproc.drill.plan import Setting

NOTICE_S: Final = 0.25
"""From the end of an attempt until the gate has heard of it: its record travels in batches."""

_NOT_VISITED: Final = frozenset({FallbackReason.CIRCUIT_OPEN, FallbackReason.OVERFLOW})


def entries(attempts: str) -> list[tuple[str, str]]:
    """`a:timeout,b:200` -> [("a", "timeout"), ("b", "200")]."""
    split = [entry.partition(":") for entry in attempts.split(",") if entry]
    return [(name, result) for name, _, result in split]


def result_of_visit(answer: Answered, name: str) -> str | None:
    """How the visit to an upstream ended, by `x-pointsman-attempts`; None: there was none."""
    results = [result for who, result in entries(answer.attempts) if who == name]
    # Of several tries in a visit the last one counts; the others say `retried`.
    return results[-1] if results and results[-1] not in _NOT_VISITED else None


def failure(answer: Answered, name: str) -> FallbackReason | None:
    """Why the visit to an upstream gave no answer."""
    result = result_of_visit(answer, name)
    return FallbackReason(result) if result in set(FallbackReason) else None


def percentile(values: Iterable[float], share: float) -> float:
    """By nearest rank: a value that occurred. `values` must not be empty."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)]


@dataclass(frozen=True, slots=True)
class Transition:
    """The circuit entered `after` later than `lo_s` and no later than `hi_s`."""

    after: State
    lo_s: float
    hi_s: float


def moves(state: State, before: Look, after: Look) -> list[State]:
    """The states entered between two looks, in the only order that the policy allows."""
    left = Counter({each: after.entered[each] - before.entered[each] for each in State})
    found: list[State] = []
    while True:
        match state:
            case State.CLOSED:
                state = State.OPEN
            case State.OPEN:
                state = State.HALF_OPEN
            case State.HALF_OPEN:
                # It closed last, if it closed at all, unless it can only have opened after that.
                reopened = left[State.OPEN] and (left[State.HALF_OPEN] or not left[State.CLOSED])
                state = State.OPEN if reopened else State.CLOSED
        if left[state] <= 0:
            return found
        left[state] -= 1
        found.append(state)


def transitions(looks: Sequence[Look]) -> list[Transition]:
    if not looks:
        return []
    # An elapsed cooldown shows as half-open before anything was entered.
    state, found = looks[0].state, list[Transition]()
    if state is State.HALF_OPEN and not looks[0].entered[State.HALF_OPEN]:
        state = State.OPEN
    for before, after in pairwise(looks):
        for entered in moves(state, before, after):
            found.append(Transition(entered, before.begun_s, after.done_s))
            state = entered
    return found


@dataclass(frozen=True, slots=True)
class Story:
    """A whole drill, in order. Requests are sorted into its parts by when they were due."""

    setting: Setting
    sent: tuple[Sent, ...]
    answers: tuple[Answered, ...]
    """In the order in which they were complete."""
    made: Made
    mended: Mended
    looks: tuple[Look, ...]
    transitions: tuple[Transition, ...]
    before: Totals
    after: Totals
    visits: tuple[Visit, ...]

    @classmethod
    def of(cls, setting: Setting, events: Iterable[Event]) -> Story:
        """The events of a drill that came to its end, in any order."""
        found = list(events)
        answers = [each for each in found if isinstance(each, Answered)]
        looks = sorted(
            (each for each in found if isinstance(each, Look)), key=lambda each: each.begun_s
        )
        totals = [each for each in found if isinstance(each, Totals)]
        return cls(
            setting=setting,
            sent=tuple(each for each in found if isinstance(each, Sent)),
            answers=tuple(sorted(answers, key=lambda each: each.done_s)),
            made=next(each for each in found if isinstance(each, Made)),
            mended=next(each for each in found if isinstance(each, Mended)),
            looks=tuple(looks),
            transitions=tuple(transitions(looks)),
            before=min(totals, key=lambda each: each.at_s),
            after=max(totals, key=lambda each: each.at_s),
            visits=tuple(each for each in found if isinstance(each, Visit)),
        )

    @property
    def calm(self) -> list[Answered]:
        """Answered before the fault."""
        return [each for each in self.answers if each.done_s < self.made.begun_s]

    @property
    def broken(self) -> list[Answered]:
        """Sent while the fault was surely on."""
        return [
            each for each in self.answers if self.made.done_s < each.sent_s < self.mended.begun_s
        ]

    @property
    def failures(self) -> list[Answered]:
        """Answered by another upstream, or by nobody, after a visit to the broken one."""
        name = self.setting.name
        return [each for each in self.answers if failure(each, name) is not None]

    @property
    def opened(self) -> Transition | None:
        moved = (each for each in self.transitions if each.hi_s > self.made.begun_s)
        return next((each for each in moved if each.after is State.OPEN), None)

    @property
    def closed(self) -> Transition | None:
        """The last one; None: it is not closed at the end, or never opened."""
        last = self.transitions[-1] if self.transitions else None
        return last if last is not None and last.after is State.CLOSED else None

    def surely_open(self, at_s: float) -> bool:
        """Whether whatever was due then must have met an open circuit.

        Not before the look that saw it open, nor near the end of its shortest possible cooldown:
        what was due then may have been admitted later.
        """
        cooldown_s = self.setting.policy.cooldown_s
        edge_s = min(NOTICE_S, cooldown_s / 4)
        return any(
            each.hi_s < at_s < each.lo_s + cooldown_s - edge_s
            for each in self.transitions
            if each.after is State.OPEN
        )

    @property
    def while_open(self) -> list[Answered]:
        return [each for each in self.answers if self.surely_open(each.sent_s)]

    @property
    def reached(self) -> list[Answered]:
        """Went to the broken upstream, whether Envoy or the upstream itself says so."""
        arrived = {each.serial for each in self.visits if each.upstream == self.setting.upstream}
        name = self.setting.name
        return [
            each
            for each in self.answers
            if self.made.done_s < each.sent_s < self.mended.begun_s
            and (each.serial in arrived or result_of_visit(each, name) is not None)
        ]

    @property
    def waited(self) -> list[Answered]:
        """The failures that it took to open the circuit."""
        opened = self.opened
        return [each for each in self.failures if opened is None or each.sent_s <= opened.hi_s]

    @property
    def trials(self) -> list[Answered]:
        """Let through to the upstream while its circuit was not closed."""
        return [
            each
            for each in self.answers
            if self._tripped(each.sent_s)
            and not self.surely_open(each.sent_s)
            and result_of_visit(each, self.setting.name) is not None
        ]

    def _tripped(self, at_s: float) -> bool:
        """Whether the circuit was surely open or half-open."""
        tripped = False
        for each in self.transitions:
            if each.after is State.OPEN and each.hi_s < at_s:
                tripped = True
            elif each.after is State.CLOSED and each.lo_s < at_s:
                tripped = False
        return tripped

    @property
    def back(self) -> Answered | None:
        """The first answer of the mended upstream."""
        mended_s = self.mended.done_s
        by_it = (each for each in self.answers if each.upstream == self.setting.name)
        return next((each for each in by_it if each.sent_s > mended_s), None)

    @property
    def recovered(self) -> list[Answered]:
        """Sent after all was well again."""
        closed = self.closed
        since_s = max(self.mended.done_s, closed.hi_s if closed else 0.0)
        return [each for each in self.answers if each.sent_s > since_s]


def most_at_once(answers: Sequence[Answered]) -> int:
    ends = [(each.done_s, -1) for each in answers]
    starts = [(each.sent_s, 1) for each in answers]
    now = most = 0
    for _, step in sorted(ends + starts):
        now += step
        most = max(most, now)
    return most
