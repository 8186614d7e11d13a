"""The gate in service: gives the pure circuits their clock, and tells metrics and log what moved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from extproc.core import accounts
from extproc.core.accounts import AttemptRecord, RequestRecord, Verdict
from extproc.core.circuit import CircuitView, GateBank, State, Ticket, Transition
from extproc.core.errors import FallbackReason
from extproc.metrics import Metrics

_log = logging.getLogger(__name__)


class Gate:
    """Implements the servicer's Gatekeeper and the access log's Observer on one event loop."""

    def __init__(
        self,
        bank: GateBank,
        *,
        upstream_names: Mapping[str, str],
        clock: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        """`upstream_names`: id -> name; `clock`: monotonic seconds."""
        self._bank = bank
        self._names = upstream_names
        self._ids = {name: upstream for upstream, name in upstream_names.items()}
        self._clock = clock
        self._metrics = metrics
        for upstream, name in upstream_names.items():
            metrics.watch_circuit(name, self._reader(upstream))

    def admit(self, upstreams: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        admission = self._bank.admit(upstreams, self._clock())
        if admission.transitions:
            self._tell(admission.transitions)
        return admission.skip, admission.ticket.encode()

    def circuits(self) -> dict[str, CircuitView]:
        """By the upstream's name, all at one moment."""
        now_s = self._clock()
        return {name: self._bank.view(upstream, now_s) for upstream, name in self._names.items()}

    def attempt_ended(self, record: AttemptRecord) -> None:
        ticket = Ticket.decode(record.admission)
        now_s = self._clock()
        match accounts.verdict(record):
            case Verdict.SUCCEEDED:
                self._tell(self._bank.succeeded(record.upstream, ticket, now_s))
            case Verdict.FAILED:
                reason = FallbackReason(record.fail)
                self._tell(self._bank.failed(record.upstream, reason, ticket, now_s))
            case Verdict.NOTHING:
                self._bank.abandoned(record.upstream, ticket)
            case Verdict.PENDING:
                pass

    def request_ended(self, record: RequestRecord) -> None:
        ticket = Ticket.decode(record.admission)
        if ticket is None:
            return
        now_s = self._clock()
        for name in accounts.passed_over(record):
            upstream = self._ids.get(name)
            if upstream is not None and upstream not in record.skip:
                self._tell(self._bank.ejected(upstream, ticket, now_s))
        for trial in ticket.trials:  # a reserve that was never needed
            self._bank.abandoned(trial.upstream, ticket)

    def _reader(self, upstream: str) -> Callable[[], State]:
        return lambda: self._bank.state(upstream, self._clock())

    def _tell(self, transitions: Iterable[Transition]) -> None:
        for moved in transitions:
            name = self._names[moved.upstream]
            self._metrics.circuit_moved(name, moved.after)
            _log.warning(
                "circuit of %s: %s -> %s (%s)",
                name,
                moved.before.value,
                moved.after.value,
                moved.cause.value,
            )
