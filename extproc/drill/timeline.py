"""Events as they come -> rows that a stranger can read; it judges nothing and prints nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from extproc.core.circuit import State
from extproc.core.errors import FallbackReason
from extproc.drill.events import Answered, Ended, Event, Look, Made, Mended, Sent
from extproc.drill.plan import Setting
from extproc.drill.story import failure, moves, percentile, result_of_visit
from extproc.drill.words import many, ms

ROW_AT_LEAST_EVERY_S: Final = 10.0
"""A long quiet part gets a row that often, so that a watcher sees it go on."""


@dataclass(frozen=True, slots=True)
class Row:
    """`at_s`: when it was known; what it tells of may have begun earlier."""

    at_s: float
    text: str


class _Kind(Enum):
    """What became of a request, as far as the upstream under drill is concerned."""

    SERVED = auto()
    WAITED = auto()
    TRIAL_SERVED = auto()
    TRIAL_FAILED = auto()
    SKIPPED = auto()
    CUT = auto()
    SHORT = auto()
    LOST = auto()
    OTHER = auto()


_QUICK: Final = frozenset({_Kind.SERVED, _Kind.SKIPPED})
_SLOW: Final = frozenset({_Kind.WAITED, _Kind.TRIAL_FAILED})
_NONE: Final[frozenset[_Kind]] = frozenset()
# A look comes a moment after the change, and the first requests that meet it may be faster.
_MADE_BY_IT: Final = {
    (State.CLOSED, State.OPEN): frozenset({_Kind.SKIPPED}),
    (State.OPEN, State.HALF_OPEN): frozenset({_Kind.TRIAL_SERVED, _Kind.TRIAL_FAILED}),
}


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests of one part of the drill that ended alike."""

    part: int
    kind: _Kind
    by: str
    reason: str


class Timeline:
    """Feed it every event once, in the order of arrival; rows come as soon as they are complete.

    Mutable: `_state` of the circuit and the last `_look`; `_part`, the number of changes so far;
    `_parts`, the part in which each request without an answer was sent and what the circuit then
    was; `_groups` that still grow; `_failures` since the fault; `_made`.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._state = State.CLOSED
        self._look: Look | None = None
        self._part = 0
        self._parts: dict[int, tuple[int, State]] = {}
        self._groups: dict[_Group, list[Answered]] = defaultdict(list)
        self._failures = 0
        self._made = False

    def feed(self, event: Event) -> list[Row]:
        match event:
            case Sent():
                self._parts[event.serial] = self._part, self._state
                return self._full(event.at_s)
            case Answered():
                return self._answered(event)
            case Made():
                self._made = True
                return self._change(event.done_s, f"{self._setting.fault} made on {self._name}")
            case Mended():
                return self._change(event.done_s, f"{self._name} mended")
            case Look():
                return self._looked(event)
            case _:
                return []

    def close(self, at_s: float) -> list[Row]:
        """What is still to be told when nothing more will come."""
        rows = [self._row(group, at_s) for group in self._groups]
        self._groups.clear()
        return rows

    @property
    def _name(self) -> str:
        return self._setting.name

    def _answered(self, answer: Answered) -> list[Row]:
        part, state = self._parts.pop(answer.serial)
        if self._made and failure(answer, self._name) is not None:
            self._failures += 1
        kind = _kind(answer, self._name, state)
        reason = str(failure(answer, self._name) or "") or answer.fallback
        if kind in (_Kind.OTHER, _Kind.LOST):
            reason = str(answer.status)
        self._groups[_Group(part, kind, answer.upstream, reason)].append(answer)
        return self._tell(answer.done_s, self._complete())

    def _change(self, at_s: float, text: str, *, behind: frozenset[_Kind] = _NONE) -> list[Row]:
        """A new part begins. Of the old one, those who wait are told of when the last is answered.

        `behind`: kinds of requests that belong behind the change although it was seen after them.
        """
        self._part += 1
        complete = self._complete()
        told = [each for each in self._groups if each.kind in _QUICK or each in complete]
        first = self._tell(at_s, [each for each in told if each.kind not in behind])
        return [*first, Row(at_s, text), *self._tell(at_s, [g for g in told if g.kind in behind])]

    def _complete(self) -> list[_Group]:
        """Groups of parts that are over and wait for no answer."""
        waited_for = {part for part, _ in self._parts.values()} | {self._part}
        return [each for each in self._groups if each.part not in waited_for]

    def _full(self, at_s: float) -> list[Row]:
        """Groups that have grown for long enough."""
        return self._tell(
            at_s,
            [
                group
                for group, answers in self._groups.items()
                if group.kind not in _SLOW and at_s - answers[0].sent_s >= ROW_AT_LEAST_EVERY_S
            ],
        )

    def _tell(self, at_s: float, groups: Iterable[_Group]) -> list[Row]:
        rows = []
        for group in groups:
            rows.append(self._row(group, at_s))
            del self._groups[group]
        return rows

    def _looked(self, look: Look) -> list[Row]:
        before, self._look = self._look, look
        if before is None:
            self._state = look.state
            return []
        rows: list[Row] = []
        for entered in moves(self._state, before, look):
            was, self._state = self._state, entered
            behind = _MADE_BY_IT.get((was, entered), _NONE)
            rows += self._change(look.done_s, self._moved(was, entered), behind=behind)
        return rows

    def _moved(self, was: State, entered: State) -> str:
        circuit, policy = f"circuit of {self._name}", self._setting.policy
        match was, entered:
            case State.HALF_OPEN, State.OPEN:
                return (
                    f"{circuit} open again: a trial failed; next trials in {policy.cooldown_s:g} s"
                )
            case _, State.OPEN if self._setting.streams:
                return f"{circuit} OPEN"  # streams end later than they fail
            case _, State.OPEN:
                return f"{circuit} OPEN after {many(self._failures, 'failure')}"
            case _, State.HALF_OPEN:
                trials = many(policy.half_open_max_requests, "trial")
                return f"{circuit} half-open: the cooldown is over; at most {trials} at once"
            case _:
                return f"{circuit} CLOSED: a trial succeeded; traffic is back"

    def _row(self, group: _Group, at_s: float) -> Row:
        answers = self._groups[group]
        took = _took(answers)
        requests, trials = many(len(answers), "request"), many(len(answers), "trial")
        sent = [answer.sent_s for answer in answers]
        since = f"{min(sent):.1f}" if len(sent) == 1 else f"{min(sent):.1f} to {max(sent):.1f}"
        match group.kind:
            case _Kind.SERVED:
                text = f"{requests} answered by {group.by} in {took}"
            case _Kind.WAITED:
                text = f"{requests} waited {took}, then {group.by} answered: {group.reason}"
            case _Kind.TRIAL_SERVED:
                text = f"{trials} answered by {group.by} in {took}"
            case _Kind.TRIAL_FAILED:
                text = f"{trials} waited {took}, then {group.by} answered: {group.reason}"
            case _Kind.SKIPPED:
                text = f"{requests} answered by {group.by} in {took}: {group.reason}"
            case _Kind.CUT:
                text = f"{requests} broke off at {group.by} after {took}, as the clients could tell"
            case _Kind.SHORT:
                text = f"{requests} ended like answers of {group.by} after {took} and were none"
            case _Kind.LOST:
                text = f"{requests} got no answer in {took}"
            case _Kind.OTHER:
                text = f"{requests} got status {group.reason} from {group.by or 'Envoy'} in {took}"
        return Row(at_s, f"{text} (sent at {since} s)")


def timeline(setting: Setting, events: Iterable[Event]) -> list[Row]:
    """All rows of a drill whose events are in the order of arrival."""
    lines, rows, last_s = Timeline(setting), list[Row](), 0.0
    for event in events:
        rows += lines.feed(event)
        last_s = event.done_s if isinstance(event, Answered) else last_s
    return rows + lines.close(last_s)


def _kind(answer: Answered, name: str, state_when_sent: State) -> _Kind:
    if answer.ended is Ended.NOTHING:
        return _Kind.LOST
    if answer.status != 200:
        return _Kind.OTHER
    if answer.ended is Ended.BROKEN:
        return _Kind.CUT
    if answer.ended is Ended.SHORT:
        return _Kind.SHORT
    trial = state_when_sent is not State.CLOSED
    if failure(answer, name) is not None:
        return _Kind.TRIAL_FAILED if trial else _Kind.WAITED
    if result_of_visit(answer, name) is not None:
        return _Kind.TRIAL_SERVED if trial else _Kind.SERVED
    return _Kind.SKIPPED if answer.fallback == FallbackReason.CIRCUIT_OPEN else _Kind.SERVED


def _took(answers: Iterable[Answered]) -> str:
    took_s = [answer.took_s for answer in answers]
    if len(took_s) == 1:
        return ms(took_s[0])
    return f"{ms(percentile(took_s, 0.5))} (p99 {ms(percentile(took_s, 0.99))})"
