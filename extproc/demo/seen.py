"""What a scripted upstream saw, newest last and bounded; it shows nobody a key or a prompt."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_REQUESTS: Final = 10_000
MOST_BODY_BYTES: Final = 128 * 1024 * 1024

# Headers that hold no secret; every other value is shown as a digest.
_PLAIN_HEADERS: Final = frozenset(
    [
        "accept",
        "accept-encoding",
        "content-length",
        "content-type",
        "host",
        "traceparent",
        "transfer-encoding",
        "user-agent",
        "via",
        "x-envoy-attempt-count",
        "x-request-id",
    ]
)
_PLAIN_PREFIXES: Final = ("x-pointsman-", "x-forwarded-")


class Ended(StrEnum):
    """How an exchange ended, as this end of the connection knows it."""

    ANSWERED = "answered"
    CLIENT_LEFT = "client_left"
    BROKEN = "broken"
    """This upstream broke it, as its fault says."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request. Times are `time.monotonic()`; `ended` None: still in progress."""

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    """As received, case-insensitive; a multi-dict, so `getall` shows repeated ones."""
    body: bytes = field(repr=False)
    model: str | None
    """The top-level `model` of the body; None: there was none."""
    at_s: float
    """When the request had arrived in full."""
    fault: str | None = None
    """The kind of fault that hit it."""
    ended: Ended | None = None
    ended_at_s: float | None = None

    @property
    def cancelled(self) -> bool:
        """The client (Envoy) left before the answer was complete; `ended_at_s` says when."""
        return self.ended is Ended.CLIENT_LEFT


class Record:
    """The last requests of one upstream. Mutable: `_seen` by serial, `_body_bytes`, `total`."""

    def __init__(
        self, *, most_requests: int = MOST_REQUESTS, most_body_bytes: int = MOST_BODY_BYTES
    ) -> None:
        self._most_requests = most_requests
        self._most_body_bytes = most_body_bytes
        self._seen: dict[int, Seen] = {}
        self._body_bytes = 0
        self.total = 0

    def add(self, seen: Seen) -> int:
        """Keep it, dropping the oldest beyond either bound; answers its serial for `end`."""
        serial = self.total
        self.total += 1
        self._seen[serial] = seen
        self._body_bytes += len(seen.body)
        while len(self._seen) > self._most_requests or (
            self._body_bytes > self._most_body_bytes and len(self._seen) > 1
        ):
            oldest = next(iter(self._seen))
            self._body_bytes -= len(self._seen.pop(oldest).body)
        return serial

    def end(self, serial: int, ended: Ended, *, now_s: float) -> None:
        """Say how it ended: the first word counts, and a request dropped meanwhile is no error."""
        seen = self._seen.get(serial)
        if seen is not None and seen.ended is None:
            self._seen[serial] = dataclasses.replace(seen, ended=ended, ended_at_s=now_s)

    def all(self) -> list[Seen]:
        return list(self._seen.values())

    def clear(self) -> None:
        """Forget every request; serials and `total` go on."""
        self._seen.clear()
        self._body_bytes = 0

    def summary(self, *, last: int, now_s: float) -> dict[str, Any]:
        """Counts over what is kept, and the last requests, JSON-ready."""
        kept = self.all()
        return {
            "total": self.total,
            "kept": len(kept),
            "ended": dict(Counter(seen.ended or "in_progress" for seen in kept)),
            "models": dict(Counter(seen.model or "" for seen in kept)),
            "faults": dict(Counter(seen.fault for seen in kept if seen.fault)),
            "last": [
                _shown(seen, now_s=now_s) for seen in kept[len(kept) - min(last, len(kept)) :]
            ],
        }


def _shown(seen: Seen, *, now_s: float) -> dict[str, Any]:
    end_s = now_s if seen.ended_at_s is None else seen.ended_at_s
    return {
        "method": seen.method,
        "path": seen.path,
        "model": seen.model,
        "fault": seen.fault,
        "ended": seen.ended or "in_progress",
        "ago_s": round(now_s - seen.at_s, 3),
        "took_s": round(end_s - seen.at_s, 4),
        "body_bytes": len(seen.body),
        "body_sha256": hashlib.sha256(seen.body).hexdigest()[:16],
        "headers": {
            name.lower(): _shown_header(name, value) for name, value in seen.headers.items()
        },
    }


def _shown_header(name: str, value: str) -> str:
    lower = name.lower()
    if lower in _PLAIN_HEADERS or lower.startswith(_PLAIN_PREFIXES):
        return value
    return f"sha256:{hashlib.sha256(value.encode('utf-8', 'replace')).hexdigest()[:12]}"
