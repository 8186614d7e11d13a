"""The half-open gate: which upstreams a request may try; it knows no clock, header, metric or I/O.

Envoy's outlier detection ejects an upstream after consecutive failures, and alone carries the
policy while the sidecar is down. It has neither a sliding window nor a half-open state; the gate
adds both. Time is passed in as seconds of any monotonic clock, and every transition is a value.

**Evidence arrives late**: out of order, twice or never, and about attempts older than what the
gate has decided since. So every admission is stamped with the bank's *epoch*, the number of
transitions so far in any of its circuits. A gate remembers the epoch of its own last transition,
and news is *current* when it comes from an admission stamped no earlier. One number per request
thus orders it against every circuit of its chain. News that is not current moves nothing:

- A stale success closes nothing: it tells how the upstream was before it broke.
- A stale failure or ejection opens nothing: what hung before the upstream recovered says nothing
  about it now. The requests admitted since will say it, `failure_threshold` of them at most.
- The same holds for tickets of another process (`run`), unreadable ones, and attempts that passed
  the sidecar by. Envoy has counted their failures too, and one ejection seen by an admitted
  request opens the circuit.

**Trials** are the admissions that let a request through to a half-open upstream. Each holds one of
`half_open_max_requests` tokens until its verdict, its return or its deadline, so that a lost
record never sticks a gate. Tokens outlive transitions: when a cooldown is shorter than a timeout,
a trial of the last half-open period is still in flight in the next one.

**Who gets a token.** The first upstream of a chain that is not skipped is tried for certain; those
behind it only when it fails. A half-open upstream is therefore let through

- for certain, if everything before it is skipped: any free token will do;
- in reserve, behind exactly one upstream let through and if no closed one could take over from
  that: only while another token stays free, so that reserves, which mostly end untried, never
  keep out a request that would try it for certain.

Otherwise it is skipped. Without reserves, a fallback that broke once could only return after its
primary had opened, and until then every failure of the primary would end in the rule.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from extproc.core.errors import FallbackReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def _default_counted() -> frozenset[FallbackReason]:
    return frozenset(
        {FallbackReason.TIMEOUT, FallbackReason.SERVER_ERROR, FallbackReason.CONNECT_ERROR}
    )


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """When an upstream is not worth waiting for.

    Shared by Envoy's outlier detection (which alone carries it while the sidecar is down) and by
    the gate.
    """

    failure_threshold: int = 5
    window_s: float = 30.0
    cooldown_s: float = 30.0
    half_open_max_requests: int = 3
    counted_errors: frozenset[FallbackReason] = field(default_factory=_default_counted)


class State(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Cause(StrEnum):
    """What moves a circuit."""

    THRESHOLD = "threshold"
    """`failure_threshold` counted failures inside `window_s`."""
    EJECTED = "ejected"
    """Envoy's outlier detection passed the upstream over."""
    COOLDOWN = "cooldown"
    TRIAL_SUCCEEDED = "trial_succeeded"
    TRIAL_FAILED = "trial_failed"


# The whole policy. A cause that is missing from a state does not move it: late news, not an error.
# Half-open ignores EJECTED: Envoy kept the trial from the upstream, which proves nothing about it
# and costs the client milliseconds; another cooldown would keep traffic from it for longer than
# Envoy does.
_NEXT: Final[Mapping[State, Mapping[Cause, State]]] = {
    State.CLOSED: {Cause.THRESHOLD: State.OPEN, Cause.EJECTED: State.OPEN},
    State.OPEN: {Cause.COOLDOWN: State.HALF_OPEN},
    State.HALF_OPEN: {Cause.TRIAL_SUCCEEDED: State.CLOSED, Cause.TRIAL_FAILED: State.OPEN},
}


@dataclass(frozen=True, slots=True)
class Transition:
    upstream: str
    before: State
    after: State
    cause: Cause


@dataclass(frozen=True, slots=True)
class Trial:
    """One token of a half-open upstream; `serial` is unique within a run."""

    upstream: str
    serial: int


_NUMBER: Final = r"(?:0|[1-9][0-9]{0,14})"  # ASCII; int() alone reads " 1_0" and Arabic digits
_TICKET: Final = re.compile(rf"([^.,:\s]+)\.({_NUMBER})((?:,[^,:\s]+:{_NUMBER})*)")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an admission was, as it travels with the request and comes back in its records.

    `run` names the process that admitted it, `epoch` how many transitions that had seen.
    """

    run: str
    epoch: int
    trials: tuple[Trial, ...] = ()

    def encode(self) -> str:
        """`run.epoch`, then `,upstream:serial` for each trial."""
        if not self.trials:
            return f"{self.run}.{self.epoch}"
        trials = ",".join(f"{trial.upstream}:{trial.serial}" for trial in self.trials)
        return f"{self.run}.{self.epoch},{trials}"

    @classmethod
    def decode(cls, text: str) -> Ticket | None:
        """The ticket, or None for whatever `encode` cannot have written."""
        match = _TICKET.fullmatch(text)
        if match is None:
            return None
        run, epoch, rest = match.groups()
        trials = (trial.split(":") for trial in rest.split(",")[1:])
        return cls(run, int(epoch), tuple(Trial(name, int(serial)) for name, serial in trials))


@dataclass(frozen=True, slots=True)
class Admission:
    """Which upstreams of a chain to pass over, the ticket to send along, and what moved."""

    skip: tuple[str, ...]
    ticket: Ticket
    transitions: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class CircuitView:
    """One circuit as a person wants to see it."""

    state: State
    half_open_in_s: float | None
    """Left of the cooldown; None unless open."""
    failures: int
    """Counted ones inside the window; 0 unless closed."""
    trials: int
    """Tokens that are out."""


class _Gate:
    """One upstream's circuit."""

    # Mutable, all of it by GateBank:
    # state, since, entered_s   the state, and the epoch and the time of the transition into it
    # failures                  when the last `failure_threshold` counted ones came
    # tokens                    serial of each trial in flight -> when it counts as lost
    __slots__ = ("entered_s", "failures", "since", "state", "tokens", "trial_timeout_s", "upstream")

    def __init__(self, upstream: str, trial_timeout_s: float, failure_threshold: int) -> None:
        self.upstream = upstream
        self.trial_timeout_s = trial_timeout_s
        self.state = State.CLOSED
        self.since = 0
        self.entered_s = 0.0
        self.failures: deque[float] = deque(maxlen=failure_threshold)
        self.tokens: dict[int, float] = {}


class GateBank:
    """The circuits of all upstreams, shared by all chains.

    `trial_timeouts_s` names every upstream and the longest time from the start of a visit to it
    until its record is here; a token that is out for longer counts as lost. `run` differs for
    every process. An upstream that has no circuit is never skipped, and news of it is ignored.
    """

    # Mutable: the gates, and
    # _epoch    transitions so far
    # _serial   tokens issued so far
    # _tripped  circuits that are not closed
    # _clear    what every chain is answered while that is none; one per epoch
    __slots__ = ("_clear", "_epoch", "_gates", "_policy", "_run", "_serial", "_tripped")

    def __init__(
        self, policy: CircuitPolicy, trial_timeouts_s: Mapping[str, float], *, run: str
    ) -> None:
        for upstream in trial_timeouts_s:
            ticket = Ticket(run, 0, (Trial(upstream, 0),))
            if Ticket.decode(ticket.encode()) != ticket:
                # No record would ever be recognised: the gate would look alive and decide nothing.
                raise ValueError(f"cannot travel in a ticket: run {run!r}, upstream {upstream!r}")
        self._policy = policy
        self._run = run
        self._gates = {
            upstream: _Gate(upstream, timeout_s, policy.failure_threshold)
            for upstream, timeout_s in trial_timeouts_s.items()
        }
        self._epoch = 0
        self._serial = 0
        self._tripped = 0
        self._clear = Admission((), Ticket(run, 0))

    def state(self, upstream: str, now_s: float) -> State:
        """The state an admission at `now_s` would meet; a look moves nothing."""
        gate = self._gates[upstream]
        return State.HALF_OPEN if self._cooled_down(gate, now_s) else gate.state

    def view(self, upstream: str, now_s: float) -> CircuitView:
        """See `state`; this moves nothing either."""
        gate = self._gates[upstream]
        state = self.state(upstream, now_s)
        is_open = state is State.OPEN
        since_s = now_s - self._policy.window_s
        return CircuitView(
            state,
            gate.entered_s + self._policy.cooldown_s - now_s if is_open else None,
            sum(at_s >= since_s for at_s in gate.failures),
            sum(at_s > now_s for at_s in gate.tokens.values()),
        )

    def admit(self, chain: Sequence[str], now_s: float) -> Admission:
        """Decide about one request that will try `chain`, distinct upstream ids, in that order."""
        if not self._tripped:
            return self._clear
        transitions: list[Transition] = []
        passed: list[_Gate] = []
        waiting: list[_Gate] = []
        trials: list[Trial] = []
        for gate in filter(None, map(self._gates.get, chain)):
            if self._cooled_down(gate, now_s):
                transitions += self._move(gate, Cause.COOLDOWN, now_s)
            if gate.state is State.CLOSED:
                passed.append(gate)
            elif not passed and (trial := self._take(gate, now_s)):
                trials.append(trial)
                passed.append(gate)
            else:
                waiting.append(gate)
        if len(passed) == 1:
            # What waits in front has no free token, let alone one to spare: only those behind can.
            wait_s = passed[0].trial_timeout_s
            for at, gate in enumerate(waiting):
                if trial := self._take(gate, now_s, wait_s=wait_s, spare=1):
                    trials.append(trial)
                    del waiting[at]
                    break
        # Stamped after the cooldowns above, or the trials would be older than their own period.
        ticket = Ticket(self._run, self._epoch, tuple(trials))
        return Admission(tuple(gate.upstream for gate in waiting), ticket, tuple(transitions))

    def succeeded(
        self, upstream: str, ticket: Ticket | None, now_s: float
    ) -> tuple[Transition, ...]:
        """The upstream gave an answer that was passed on, a client error of its own included.

        May be told as soon as the headers are in, and again at the end.
        """
        gate, on_trial = self._heard(upstream, ticket)
        # A success in a closed circuit forgives nothing: 4 failures and a success, repeated, is
        # what consecutive counting never sees.
        return self._move(gate, Cause.TRIAL_SUCCEEDED, now_s) if gate and on_trial else ()

    def failed(
        self, upstream: str, reason: FallbackReason, ticket: Ticket | None, now_s: float
    ) -> tuple[Transition, ...]:
        """The visit to the upstream ended without an answer.

        A reason that is not counted proves nothing either way: a trial's token comes back. Nothing
        tells one ordinary visit from another, so news told twice counts twice.
        """
        gate, on_trial = self._heard(upstream, ticket)
        if gate is None or reason not in self._policy.counted_errors:
            return ()
        if on_trial:
            return self._move(gate, Cause.TRIAL_FAILED, now_s)
        gate.failures.append(now_s)
        full = len(gate.failures) == gate.failures.maxlen
        if full and now_s - gate.failures[0] <= self._policy.window_s:
            return self._move(gate, Cause.THRESHOLD, now_s)
        return ()

    def ejected(self, upstream: str, ticket: Ticket | None, now_s: float) -> tuple[Transition, ...]:
        """The upstream was passed over: by Envoy, or because the admission said so.

        Only Envoy's own ejection moves anything. What the admission skipped was open or half-open,
        which an ejection does not move, or has changed since, which makes this news stale.
        """
        gate, _ = self._heard(upstream, ticket)
        return self._move(gate, Cause.EJECTED, now_s) if gate else ()

    def abandoned(self, upstream: str, ticket: Ticket | None) -> None:
        """The visit will have no verdict: its client left, or an earlier upstream had answered."""
        self._heard(upstream, ticket)

    def _heard(self, upstream: str, ticket: Ticket | None) -> tuple[_Gate | None, bool]:
        """Take the token back; answer the gate if the news is current, and if it is of a trial."""
        gate = self._gates.get(upstream)
        if gate is None or ticket is None or ticket.run != self._run:
            return None, False
        on_trial = False
        for trial in ticket.trials:
            if trial.upstream == upstream:
                gate.tokens.pop(trial.serial, None)
                on_trial = True
        # An expired token does not spoil a verdict: the trial began in this half-open period.
        return (gate if gate.since <= ticket.epoch <= self._epoch else None), on_trial

    def _cooled_down(self, gate: _Gate, now_s: float) -> bool:
        return gate.state is State.OPEN and now_s - gate.entered_s >= self._policy.cooldown_s

    def _take(
        self, gate: _Gate, now_s: float, *, wait_s: float = 0.0, spare: int = 0
    ) -> Trial | None:
        """A token of a half-open gate, if `spare` others stay free; its visit begins in `wait_s`."""
        if gate.state is not State.HALF_OPEN:
            return None
        room = self._policy.half_open_max_requests - spare
        if len(gate.tokens) >= room:
            gate.tokens = {serial: at_s for serial, at_s in gate.tokens.items() if at_s > now_s}
            if len(gate.tokens) >= room:
                return None
        self._serial += 1
        gate.tokens[self._serial] = now_s + wait_s + gate.trial_timeout_s
        return Trial(gate.upstream, self._serial)

    def _move(self, gate: _Gate, cause: Cause, now_s: float) -> tuple[Transition, ...]:
        after = _NEXT[gate.state].get(cause)
        if after is None:
            return ()
        before, gate.state = gate.state, after
        self._epoch += 1
        self._tripped += (before is State.CLOSED) - (after is State.CLOSED)
        self._clear = Admission((), Ticket(self._run, self._epoch))
        gate.since = self._epoch
        gate.entered_s = now_s
        gate.failures.clear()
        return (Transition(gate.upstream, before, after, cause),)
