"""Which part of a prompt is embedded, in characters; it knows no tokeniser and no model."""

from __future__ import annotations

import re
from typing import Final

END_CHARS: Final = 2_048
MAX_CHARS: Final = 2 * END_CHARS + 104
"""What a caller may hand over uncut: two ends and whatever it put between them."""

_BLANK_LINE: Final = re.compile(r"\n\s*\n")


def bound(text: str) -> str:
    """Both ends of a text that is too long to tokenise: tokenisers read everything first."""
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:END_CHARS]}\n\n{text[-END_CHARS:]}"


def first_and_last(text: str) -> tuple[str, str]:
    """The first and the last paragraph with a word in it; lines where there is no blank line.

    The question of a long prompt stands at one of its ends; what lies between misleads.
    """
    for parts in (_BLANK_LINE.split(text), text.split("\n")):
        worded = [part for part in parts if any(map(str.isalnum, part))]
        if len(worded) > 1:
            return worded[0], worded[-1]
    return text, text
