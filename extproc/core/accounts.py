"""Envoy's records -> what became of a request: one outcome, and a reason for every fallback. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from extproc.core.errors import FallbackReason, Outcome
from extproc.core.wire_names import RULE

# Names of Envoy's response flags, as fields of envoy.data.accesslog.v3.ResponseFlags.
_UNREADABLE: Final = "downstream_protocol_error"
_CLIENT_LEFT: Final = frozenset(
    {"downstream_connection_termination", "downstream_remote_reset", _UNREADABLE}
)
_CUT: Final = frozenset(
    {
        "upstream_connection_termination",
        "upstream_protocol_error",
        "upstream_remote_reset",
        "local_reset",
        "stream_idle_timeout",
        "upstream_request_timeout",
        "upstream_max_stream_duration_reached",
        "duration_timeout",
        "overload_manager",
    }
)
_REASONS: Final = frozenset(reason.value for reason in FallbackReason)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as Envoy's ingress saw it end."""

    status: int
    """As sent to the client; 0: nothing was."""
    flags: frozenset[str]
    route: str = ""
    reason: str = ""
    upstream: str = ""
    """The name of the upstream that answered; empty: none did."""
    attempts: str = ""
    fallback: str = ""
    skip: frozenset[str] = frozenset()
    """Upstream ids that the gate had told Envoy to skip."""
    admission: str = ""
    request_id: str = ""
    method: str = ""
    path: str = ""
    """As the client wrote it, query included."""
    duration_s: float | None = None
    ended_s: float | None = None
    """Since 1970."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One visit to an upstream's tier, as Envoy saw it end."""

    upstream: str
    """The upstream's id."""
    status: int
    flags: frozenset[str]
    fail: str = ""
    """A FallbackReason, or empty when the answer counts as one."""
    admission: str = ""
    time_to_headers_s: float | None = None
    ended: bool = True
    """False: an interim record of an answer that is still streaming."""
    route: str = ""
    is_stream: bool = False
    """Whether the answer was an event stream."""
    time_to_first_chunk_s: float | None = None
    """Of the body; like time_to_headers_s from the attempt's start, tries before it included."""
    time_to_last_byte_s: float | None = None
    """From the upstream."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def token_gap_s(self) -> float | None:
        """Mean time between two tokens of a whole stream; None where the record cannot tell.

        It knows the first chunk, the last byte and the number of tokens, so a stall amid a fast
        stream shows as a slightly longer mean, and a stream without usage not at all.
        """
        first_s, last_s, tokens = (
            self.time_to_first_chunk_s,
            self.time_to_last_byte_s,
            self.completion_tokens,
        )
        if not self.is_stream or first_s is None or last_s is None or not tokens or tokens < 2:
            return None
        return max(last_s - first_s, 0.0) / (tokens - 1)


@dataclass(frozen=True, slots=True)
class Hop:
    """One step down a chain, by upstream names."""

    reason: FallbackReason
    source: str
    target: str


def outcome(record: RequestRecord) -> Outcome:
    """The one outcome of a request; total: every record has one."""
    left = record.flags & _CLIENT_LEFT
    # Of what its codec cannot read Envoy says so with a 4xx, and only then closes.
    refused = left == {_UNREADABLE} and 400 <= record.status < 500
    if record.status == 0 or (left and not refused):
        return Outcome.CLIENT_GONE
    if record.status < 400:
        if record.flags & _CUT:
            return Outcome.STREAM_CUT
        if record.upstream == RULE:
            return Outcome.SERVED_BY_RULE
        return Outcome.SERVED_BY_FALLBACK if record.fallback else Outcome.SERVED
    # A provider's 429 that nothing could answer in its place is our failure, not the client's.
    if record.status < 500 and record.status != 429:
        return Outcome.REJECTED
    return Outcome.FAILED


def hops(attempts: str) -> list[Hop]:
    """The steps that an `x-pointsman-attempts` value tells of: `a:timeout,b:200` is one, a to b.

    Repeated tries on one upstream are no step. Anything that is not ours is ignored.
    """
    entries = [entry.partition(":")[::2] for entry in attempts.split(",") if entry]
    return [
        Hop(FallbackReason(result), source, target)
        for (source, result), (target, _) in pairwise(entries)
        if source != target and result in _REASONS
    ]


def passed_over(record: RequestRecord) -> list[str]:
    """Names of upstreams that Envoy's outlier detection had ejected, in the chain's order."""
    entries = [entry.partition(":")[::2] for entry in record.attempts.split(",") if entry]
    return [name for name, result in entries if result == FallbackReason.CIRCUIT_OPEN]


class Verdict(StrEnum):
    """What an attempt says of its upstream."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    NOTHING = "nothing"
    """Its client left, the answer broke off, or it was never tried."""
    PENDING = "pending"
    """It is still under way, and so far there is no answer that was passed on."""


def verdict(record: AttemptRecord) -> Verdict:
    if not record.ended and (record.status == 0 or record.fail or record.flags):
        # An interim record comes every second: a failure would count again and again, and a trial
        # that waits for its headers would give its token back while it is still in flight.
        return Verdict.PENDING
    if record.fail == FallbackReason.CIRCUIT_OPEN:
        return Verdict.NOTHING
    if record.fail in _REASONS:
        return Verdict.FAILED
    if record.status == 0 or record.flags & (_CLIENT_LEFT | _CUT):
        return Verdict.NOTHING
    return Verdict.SUCCEEDED
