"""Decisions by the text that was embedded: exact and bounded. Pure; it never sees a degraded one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from extproc.core.routing import RouteRule, RouteScore


class DecisionCache:
    """Mutable: `_scores`, the least recently used first."""

    def __init__(self, capacity: int, version: bytes) -> None:
        """`version`: at most 64 bytes; scores under another one are never found."""
        self._capacity = capacity
        self._version = version
        self._scores: OrderedDict[bytes, tuple[RouteScore, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def key(self, text: str) -> bytes:
        """At most 20 us: the text is cut before. Any str, each its own: no normal form."""
        return blake2b(
            text.encode("utf-8", "surrogatepass"), digest_size=16, key=self._version
        ).digest()

    def get(self, key: bytes) -> tuple[RouteScore, ...] | None:
        if (scores := self._scores.get(key)) is not None:
            self._scores.move_to_end(key)
        return scores

    def put(self, key: bytes, scores: tuple[RouteScore, ...]) -> None:
        self._scores[key] = scores
        self._scores.move_to_end(key)
        if len(self._scores) > self._capacity:
            self._scores.popitem(last=False)


def routes_version(rules: Sequence[RouteRule], model_digest: str) -> bytes:
    """What scores depend on besides the text: utterances, thresholds, and the model."""
    scored = [(rule.name, rule.utterances, rule.effective_threshold) for rule in rules]
    return blake2b(msgspec.msgpack.encode((model_digest, scored)), digest_size=32).digest()
