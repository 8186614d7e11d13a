"""Regular expressions whose cost no prompt can choose; the only importer of re2, it knows no route.

The text is a client's and the event loop waits for the verdict. Python's `re` backtracks: `(a+)+$`
does not end on 4,098 characters, and a list of ten keywords took 0.7 ms of them where RE2 takes
0.007. RE2 is linear in the text; what is left grows with the expression, hence the limit on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import re2

_MOST_STEPS: Final = 1500
"""Instructions of a compiled expression. Of expressions made for the purpose the worst under the
limit took 43 ms for 4,098 characters; usual ones take 0.01 ms. `\\p{L}+` has 1,201."""
_KEYWORD_BYTES: Final = 64 << 20
"""RE2's budget for one list of keywords; 10,000 of them take 2 MB."""


class PatternError(ValueError):
    """Why an expression cannot be used, and how to mend it, in words for the person who wrote it."""

    def __init__(self, problem: str, mend: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.mend = mend


class Pattern:
    """An expression, compiled."""

    __slots__ = ("_search",)

    def __init__(self, compiled: re2.Regexp) -> None:
        self._search = compiled.search

    def search(self, text: bytes) -> str | None:
        """The first place that matches, in a text as UTF-8."""
        found = self._search(text)
        return None if found is None else found[0].decode("utf-8", "replace")


def compile_pattern(expression: str) -> Pattern:
    """Raise PatternError."""
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(expression.encode(), options)
    except re2.error as error:
        problem = f"is no regular expression of RE2: {error.args[0].decode()}"
        mend = "write it in RE2's syntax, which has neither look-around nor back-references"
        raise PatternError(problem, mend) from None
    if compiled.programsize > _MOST_STEPS:
        problem = f"takes {compiled.programsize} steps, over the limit of {_MOST_STEPS}"
        raise PatternError(problem, "repeat less often, and name fewer characters at a time")
    return Pattern(compiled)


def compile_keywords(keywords: Sequence[str]) -> Pattern:
    """Any of these words or phrases, whatever their case."""
    options = re2.Options()
    options.case_sensitive = False
    options.max_mem = _KEYWORD_BYTES
    return Pattern(re2.compile("|".join(map(_word, keywords)).encode(), options))


def _word(keyword: str) -> str:
    r"""Whole words where the script has word boundaries; Chinese has none between words.

    RE2's \b knows ASCII words only, which is what is wanted beside an ASCII letter or digit.
    """
    pattern: str = re2.escape(keyword)
    if keyword[0].isascii() and keyword[0].isalnum():
        pattern = r"\b" + pattern
    if keyword[-1].isascii() and keyword[-1].isalnum():
        pattern += r"\b"
    return pattern
