"""Everything that can be seen during a drill, as values; times are seconds since it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from extproc.core.circuit import State


class Ended(StrEnum):
    """How an answer ended, as its client can tell."""

    WHOLE = "whole"
    BROKEN = "broken"
    """The transfer broke off, or an error event came: no client takes it for an answer."""
    SHORT = "short"
    """It ended like an answer and is none."""
    NOTHING = "nothing"
    """No response came at all."""


@dataclass(frozen=True, slots=True)
class Sent:
    serial: int
    at_s: float
    """When it was due, whether or not the sender was late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request as its client saw it end."""

    serial: int
    sent_s: float
    done_s: float
    took_s: float
    """From when it was due to the first byte of a stream, or to the end of any other answer."""
    status: int
    """0: nothing came."""
    ended: Ended
    upstream: str = ""
    fallback: str = ""
    attempts: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    """The fault was switched on somewhere between the two times."""

    begun_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class Mended:
    begun_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """A look at the upstream's circuit: its state, and how often each state was entered so far."""

    begun_s: float
    done_s: float
    state: State
    entered: Mapping[State, int]


@dataclass(frozen=True, slots=True)
class Totals:
    """The gateway's own counts at a quiet moment."""

    at_s: float
    outcomes: Mapping[str, int]
    fallbacks: Mapping[str, int]
    """Away from the upstream, by reason."""
    envoy_requests: int
    ejections: int
    """Of the upstream, by Envoy's outlier detection."""

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class Visit:
    """One try as an upstream saw it arrive."""

    upstream: str
    serial: int
    at_s: float
    model: str | None


Event: TypeAlias = Sent | Answered | Made | Mended | Look | Totals | Visit
