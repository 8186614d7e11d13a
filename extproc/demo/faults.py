"""The faults of a scripted upstream, and which one hits the next request; it opens no socket."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec


class FaultKind(StrEnum):
    """What the upstream does instead of answering well."""

    HANG = "hang"
    SERVER_ERROR = "5xx"
    REFUSED = "refused"
    RESET = "reset"
    BAD_SCHEMA = "bad_schema"
    FLAKY = "flaky"
    SLOW_HEADERS = "slow_headers"
    SLOW_FIRST_TOKEN = "slow_first_token"  # noqa: S105  a token of text
    CUT_STREAM = "cut_stream"
    STALL_STREAM = "stall_stream"
    CONTEXT_LENGTH = "context_length"
    CONTENT_POLICY = "content_policy"


class BadSchema(StrEnum):
    """Which unusable answer comes with the status 200."""

    HTML = "html"
    TORN_JSON = "torn_json"
    NO_CHOICES = "no_choices"
    EMPTY_CHOICES = "empty_choices"


class Ending(StrEnum):
    """How a cut stream ends: with an RST, or with a FIN where the last chunk should be."""

    RESET = "reset"
    CLOSE = "close"


_OPTIONS: Final[dict[FaultKind, frozenset[str]]] = {
    FaultKind.SERVER_ERROR: frozenset({"status", "retry_after_s"}),
    FaultKind.BAD_SCHEMA: frozenset({"variant"}),
    FaultKind.FLAKY: frozenset({"fail", "of", "status", "retry_after_s"}),
    FaultKind.SLOW_HEADERS: frozenset({"delay_s"}),
    FaultKind.SLOW_FIRST_TOKEN: frozenset({"delay_s"}),
    FaultKind.CUT_STREAM: frozenset({"after_chunks", "ending"}),
    FaultKind.STALL_STREAM: frozenset({"after_chunks"}),
}
_EVERY_KIND: Final = frozenset({"kind", "times", "for_s"})

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault and its dose; an option that its kind does not know is an error, not ignored."""

    kind: FaultKind
    times: _Count | None = None
    """Harm that many requests, then answer well again; None: until told otherwise."""
    for_s: _Seconds | None = None
    """Last that long, then answer well again."""
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503
    retry_after_s: Annotated[int, msgspec.Meta(ge=0)] | None = None
    variant: BadSchema = BadSchema.HTML
    fail: _Count = 1
    of: _Count = 2
    """Flaky: the first `fail` of every `of` requests fail, counted from when the fault was set."""
    delay_s: _Seconds = 5.0
    after_chunks: Annotated[int, msgspec.Meta(ge=0)] = 2
    """Pieces of content that still arrive; 0: only the response headers do."""
    ending: Ending = Ending.RESET

    def __post_init__(self) -> None:
        allowed = _EVERY_KIND | _OPTIONS.get(self.kind, frozenset())
        for field in msgspec.structs.fields(self):
            if field.name not in allowed and getattr(self, field.name) != field.default:
                takes = ", ".join(sorted(allowed - {"kind"}))
                raise ValueError(f"{self.kind} takes no {field.name!r}; it takes {takes}")
        if self.fail > self.of:
            raise ValueError(f"cannot fail {self.fail} of every {self.of} requests")
        if self.kind is FaultKind.REFUSED and self.times is not None:
            raise ValueError("refused connections cannot be counted; use for_s instead of times")


def parse_fault(document: object) -> Fault:
    """A fault from decoded JSON; raises ValueError with a message fit for the caller."""
    # Not `msgspec.convert` on the bare enum: its message would not list the kinds.
    if not isinstance(document, dict) or document.get("kind") not in list(FaultKind):
        raise ValueError(f"'kind' must be one of {', '.join(FaultKind)}")
    try:
        return msgspec.convert(document, Fault)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def describe(fault: Fault | None) -> dict[str, Any] | None:
    """The fault as JSON-ready values, with only the options that its kind knows."""
    if fault is None:
        return None
    known = _EVERY_KIND | _OPTIONS.get(fault.kind, frozenset())
    values: dict[str, Any] = msgspec.to_builtins(fault)
    return {key: value for key, value in values.items() if key in known and value is not None}


class FaultSwitch:
    """Which fault is on. Mutable: `_fault`, `_until_s`, `_asked` and `_harmed` since it was set."""

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self._until_s: float | None = None
        self._asked = 0
        self._harmed = 0

    def set(self, fault: Fault | None, *, now_s: float) -> None:
        self._fault = fault
        self._until_s = now_s + fault.for_s if fault and fault.for_s is not None else None
        self._asked = self._harmed = 0

    def current(self, *, now_s: float) -> Fault | None:
        """The fault that is on, whether or not it would hit the next request."""
        if self._until_s is not None and now_s >= self._until_s:
            self.set(None, now_s=now_s)
        return self._fault

    def take(self, *, now_s: float) -> Fault | None:
        """The fault that hits the request arriving now; counts the request."""
        fault = self.current(now_s=now_s)
        if fault is None:
            return None
        turn = self._asked % fault.of
        self._asked += 1
        if fault.kind is FaultKind.FLAKY and turn >= fault.fail:
            return None
        self._harmed += 1
        if fault.times is not None and self._harmed >= fault.times:
            self.set(None, now_s=now_s)
        return fault
