"""What a fleet of N pods, each with its own circuits, does to an upstream that dies; no network, no clock.

The circuits are the product's own (extproc.core.circuit); Envoy's outlier detection is modelled as the
bootstrap configures it. One pod is the same as a fleet that shares its view. Arrivals are random,
and every pod gets its share of them.

    python bench/fleet.py [--out bench/out/fleet.json]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from extproc.core.circuit import CircuitPolicy, GateBank, State, Ticket
from extproc.core.errors import FallbackReason

DEAD, SPARE = "dead", "spare"
OUTAGE_S, AFTER_S = 120.0, 60.0
ANSWER_S = 0.3
RECORD_S = 0.05
"""From an attempt's end to its record in the sidecar."""


@dataclass(frozen=True)
class Fault:
    name: str
    takes_s: float
    reason: FallbackReason


HANG = Fault("hangs, 5 s", 5.0, FallbackReason.TIMEOUT)
REFUSES = Fault("refuses at once", 0.01, FallbackReason.CONNECT_ERROR)


@dataclass
class Outcome:
    fault: str
    rps: float
    pods: int
    failure_threshold: int
    half_open_max_requests: int
    first: int = 0
    """Requests that met the dead upstream before their pod's circuit opened for the first time."""
    trials: int = 0
    """Those that met it later, until it was back."""
    trials_each_cooldown: float = 0.0
    opened: int = 0
    """Pods whose circuit opened."""
    last_opened_s: float | None = None
    waited_s: float = 0.0
    """What clients waited for nothing, all together."""
    back_s: float | None = None
    """From the upstream's return until the last pod's circuit was closed."""


class Pod:
    def __init__(self, number: int, policy: CircuitPolicy, fault: Fault) -> None:
        self.bank = GateBank(policy, {DEAD: fault.takes_s + 2, SPARE: 2.3}, run=f"pod{number}")
        self.opened_s: float | None = None
        self.closed_s: float | None = None
        self._policy = policy
        self._in_a_row = 0
        self._ejected_until_s = -1.0

    def is_ejected(self, now_s: float) -> bool:
        return now_s < self._ejected_until_s

    def failed(self, now_s: float) -> None:
        self._in_a_row += 1
        if self._in_a_row >= self._policy.failure_threshold:
            self._in_a_row = 0
            self._ejected_until_s = now_s + self._policy.cooldown_s - 0.5

    def succeeded(self) -> None:
        self._in_a_row = 0


def simulate(
    *, pods: int, rps: float, fault: Fault, policy: CircuitPolicy, seed: int = 1
) -> Outcome:
    chance = random.Random(seed)
    fleet = [Pod(number, policy, fault) for number in range(pods)]
    outcome = Outcome(
        fault.name, rps, pods, policy.failure_threshold, policy.half_open_max_requests
    )
    order = itertools.count()
    # (time, tie-break, pod, ticket, what): ticket None is an arrival.
    events: list[tuple[float, int, Pod, Ticket | None, bool]] = []

    def later(at_s: float, pod: Pod, ticket: Ticket | None = None, *, good: bool = False) -> None:
        heapq.heappush(events, (at_s, next(order), pod, ticket, good))

    later(chance.expovariate(rps), chance.choice(fleet))
    while events:
        now_s, _, pod, ticket, good = heapq.heappop(events)
        if ticket is None:
            if now_s < OUTAGE_S + AFTER_S:
                later(now_s + chance.expovariate(rps), chance.choice(fleet))
            admission = pod.bank.admit((DEAD, SPARE), now_s)
            if DEAD in admission.skip:
                continue
            if pod.is_ejected(now_s):
                pod.bank.ejected(DEAD, admission.ticket, now_s)
            elif now_s >= OUTAGE_S:
                later(now_s + ANSWER_S + RECORD_S, pod, admission.ticket, good=True)
                continue
            else:
                if pod.opened_s is None:
                    outcome.first += 1
                else:
                    outcome.trials += 1
                outcome.waited_s += fault.takes_s
                later(now_s + fault.takes_s + RECORD_S, pod, admission.ticket)
                continue
        elif good:
            pod.succeeded()
            pod.bank.succeeded(DEAD, ticket, now_s)
        else:
            pod.failed(now_s)
            pod.bank.failed(DEAD, fault.reason, ticket, now_s)
        state = pod.bank.state(DEAD, now_s)
        if state is State.OPEN and pod.opened_s is None:
            pod.opened_s = now_s
        if now_s >= OUTAGE_S and state is State.CLOSED and pod.closed_s is None:
            pod.closed_s = now_s
    opened = [pod.opened_s for pod in fleet if pod.opened_s is not None]
    outcome.opened = len(opened)
    if opened:
        outcome.last_opened_s = round(max(opened), 1)
        outcome.trials_each_cooldown = round(
            outcome.trials / max(1, (OUTAGE_S - min(opened)) / policy.cooldown_s), 1
        )
    if all(pod.closed_s is not None for pod in fleet):
        outcome.back_s = round(max(pod.closed_s or 0.0 for pod in fleet) - OUTAGE_S, 1)
    return outcome


def grid() -> list[Outcome]:
    article, wide = CircuitPolicy(), CircuitPolicy(failure_threshold=2, half_open_max_requests=1)
    found = [
        simulate(pods=pods, rps=rps, fault=fault, policy=article)
        for fault in (HANG, REFUSES)
        for rps in (10.0, 100.0, 1000.0)
        for pods in (1, 10, 100)
    ]
    found += [
        simulate(pods=pods, rps=rps, fault=HANG, policy=wide)
        for rps in (10.0, 100.0)
        for pods in (10, 100)
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/out/fleet.json"))
    arguments = parser.parse_args()
    found = grid()
    print(
        "| upstream | rps | pods | threshold, trials | first | waited s | opened | last s | each cooldown | back s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for each in found:
        print(
            f"| {each.fault} | {each.rps:g} | {each.pods} | {each.failure_threshold}, "
            f"{each.half_open_max_requests} | {each.first} | {each.waited_s:.0f} | {each.opened} | "
            f"{each.last_opened_s} | {each.trials_each_cooldown:g} | {each.back_s} |"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
