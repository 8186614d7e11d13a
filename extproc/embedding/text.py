"""Which part of a prompt is embedded; it knows no tokeniser and no model."""

from __future__ import annotations

import re
from typing import Final

END_CHARS: Final = 2_048
MAX_CHARS: Final = 2 * END_CHARS + 104
"""What a caller may hand over uncut: two ends and whatever it put between them."""

MAX_TOKENS: Final = 256
"""Up to here a text is one vector; in tokens of the model, or an estimate of them."""
END_TOKENS: Final = 128
"""Beyond, each end of it is a vector of at most so many tokens."""

_BLANK_LINE: Final = re.compile(r"\n\s*\n")


def bound(text: str) -> str:
    """Both ends of a text that is too long to tokenise: tokenisers read everything first."""
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:END_CHARS]}\n\n{text[-END_CHARS:]}"


def paragraphs(text: str) -> list[str]:
    """The paragraphs with a word in them; the text itself when there is none."""
    return _worded(_BLANK_LINE.split(text)) or [text]


def lines(text: str) -> list[str]:
    """The lines with a word in them; the text itself when there is none."""
    return _worded(text.split("\n")) or [text]


def _worded(parts: list[str]) -> list[str]:
    return [part for part in parts if any(map(str.isalnum, part))]
