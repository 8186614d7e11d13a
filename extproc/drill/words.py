"""How counts and times are put into words; it knows nothing of drills."""

from __future__ import annotations


def ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:,.0f} ms"


def many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
