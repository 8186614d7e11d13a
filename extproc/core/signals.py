"""Rule signals -> RouteDecision: header, content, length, keyword, pattern; it knows no meaning.

A rule admits a prompt by itself and in microseconds, so all of them are asked before the embedding
model is. Their order is fixed when the table is built: priority, then kind, then the file's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from extproc.core.errors import Content, RouteReason
from extproc.core.patterns import compile_keywords, compile_pattern
from extproc.core.routing import RouteDecision, RouteRule

ANY_VALUE: Final = "*"
"""Of a header: that it is there is enough."""

_RANK: Final = {
    RouteReason.HEADER: 0,
    RouteReason.CONTENT: 1,
    RouteReason.LENGTH: 1,
    RouteReason.KEYWORD: 2,
    RouteReason.PATTERN: 2,
}
"""Whoever sets a header means it; what a body is made of tells more than a word in it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules look at, of one request."""

    utf8: bytes
    """The text to route by."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those that rules name, by lower-case name."""
    chars: int = 0
    """Of all text, counted up to `SignalTable.enough_chars`."""
    holds: frozenset[Content] = frozenset()


Match: TypeAlias = Callable[[Facts], str | None]
"""What of the rule matched, to be shown to a person; None: nothing did."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One kind of rule of one route."""

    route: str
    reason: RouteReason
    priority: int
    match: Match


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one signal; `matched` None: it did not match."""

    route: str
    reason: RouteReason
    priority: int
    matched: str | None


class SignalTable:
    """The rules of all routes in the order in which they are asked; the first that matches decides."""

    def __init__(self, rules: Sequence[RouteRule]) -> None:
        """Raise PatternError; a configuration that was checked has no such pattern."""
        signals = [signal for rule in rules for signal in _signals(rule)]
        # The sort is stable: among equals the file's order stays.
        self._signals = sorted(signals, key=lambda each: (-each.priority, _RANK[each.reason]))
        self.is_empty = not signals
        self.headers = frozenset(name for rule in rules for name, _ in rule.headers)
        """The request headers that rules name."""
        self.looks_inside = any(rule.has for rule in rules)
        """Whether `Facts.holds` matters."""
        limits = [limit for rule in rules for limit in (rule.min_chars, rule.max_chars) if limit]
        self.enough_chars = max(limits, default=-1) + 1
        """From so many characters on it does not matter how many there are; 0: it never does."""

    def decide(self, facts: Facts) -> RouteDecision | None:
        for signal in self._signals:
            matched = signal.match(facts)
            if matched is not None:
                return RouteDecision(signal.route, signal.reason, matched=matched)
        return None

    def check(self, facts: Facts) -> tuple[Checked, ...]:
        """Every signal, in order, also those behind the one that decides."""
        return tuple(
            Checked(each.route, each.reason, each.priority, each.match(facts))
            for each in self._signals
        )


def _signals(rule: RouteRule) -> Iterator[Signal]:
    def signal(reason: RouteReason, match: Match) -> Signal:
        return Signal(rule.name, reason, rule.priority, match)

    if rule.headers:
        yield signal(RouteReason.HEADER, _header(rule.headers))
    if rule.has:
        yield signal(RouteReason.CONTENT, _content(rule.has))
    if rule.min_chars is not None or rule.max_chars is not None:
        yield signal(RouteReason.LENGTH, _length(rule.min_chars, rule.max_chars))
    if rule.keywords:
        keywords = compile_keywords(rule.keywords)
        yield signal(RouteReason.KEYWORD, lambda facts: keywords.search(facts.utf8))
    if rule.patterns:
        yield signal(RouteReason.PATTERN, _pattern(rule.patterns))


def _header(wanted: Sequence[tuple[str, str]]) -> Match:
    def match(facts: Facts) -> str | None:
        for name, value in wanted:
            if (sent := facts.headers.get(name)) is not None and value in (sent, ANY_VALUE):
                return f"{name} = {value}"
        return None

    return match


def _content(wanted: Sequence[Content]) -> Match:
    return lambda facts: next((each for each in wanted if each in facts.holds), None)


def _length(least: int | None, most: int | None) -> Match:
    limits = (("min_chars", least), ("max_chars", most))
    shown = ", ".join(f"{name} = {limit}" for name, limit in limits if limit is not None)

    def match(facts: Facts) -> str | None:
        # Tokens instead of text, or an image alone, have no length to judge by.
        fits = facts.chars >= (least or 1) and (most is None or facts.chars <= most)
        return shown if fits else None

    return match


def _pattern(expressions: Sequence[str]) -> Match:
    compiled = [(expression, compile_pattern(expression)) for expression in expressions]

    def match(facts: Facts) -> str | None:
        for expression, pattern in compiled:
            if pattern.search(facts.utf8) is not None:
                return expression
        return None

    return match
