"""Labelled prompts out of JSONL, or every fault of every line; it opens no file and decides nothing."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from extproc.config.faults import nearest, quoted

_SEED: Final = 3
_JOINER: Final = "\N{ZERO WIDTH JOINER}"
"""Makes one emoji of several; it hides and turns round nothing."""
_LABEL: Final = "write the name of a route, or null for a prompt that belongs to none"


@dataclass(frozen=True, slots=True)
class Prompt:
    """`route` None: it belongs to no route, and the default is where it should go."""

    text: str
    route: str | None


class DataError(Exception):
    """Every fault of a file of labelled prompts, a line each, in the order of its lines."""


def parse_prompts(
    lines: Iterable[bytes], *, file: str, routes: Collection[str]
) -> tuple[Prompt, ...]:
    """One JSON object a line, `{"text": "...", "route": "..." | null}`; blank lines are skipped.

    Other members are ignored: data sets carry ids and sources. Raise DataError.
    """
    prompts: list[Prompt] = []
    faults: list[tuple[int, str]] = []
    strangers: dict[str, list[int]] = {}
    for number, line in enumerate(lines, start=1):
        raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not raw.strip():
            continue
        try:
            prompt = _prompt(raw)
        except _BadLineError as error:
            faults.append((number, str(error)))
            continue
        if prompt.route is not None and prompt.route not in routes:
            strangers.setdefault(prompt.route, []).append(number)
        prompts.append(prompt)
    faults += [(at[0], _stranger(name, at, routes)) for name, at in strangers.items()]
    if not prompts and not faults:
        faults.append((1, f"there is no prompt; write one JSON object a line; {_LABEL}"))
    if faults:
        faults.sort()
        raise DataError("\n".join(printable(f"{file}:{line}: {text}") for line, text in faults))
    return tuple(prompts)


class _BadLineError(Exception):
    """What is wrong with a line, and how to mend it."""


def _prompt(raw: bytes) -> Prompt:
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:  # ValueError: JSON or UTF-8
        message = str(error).removeprefix("JSON is malformed: ")
        raise _BadLineError(f"not valid JSON: {message}; write one JSON object a line") from None
    if not isinstance(value, dict):
        raise _BadLineError('not an object; write {"text": "...", "route": "..."}')
    text = value.get("text")
    if not isinstance(text, str) or not text.strip():
        problem = "is missing" if "text" not in value else "is not a string with a word in it"
        raise _BadLineError(f'"text" {problem}; write the prompt there')
    if "route" not in value:
        raise _BadLineError(f'"route" is missing; {_LABEL}')
    route = value["route"]
    if not (route is None or isinstance(route, str)):
        raise _BadLineError(f'"route" is neither a string nor null; {_LABEL}')
    return Prompt(text, route)


def _stranger(name: str, lines: Sequence[int], routes: Collection[str]) -> str:
    meant = nearest(name, routes)
    mend = f"did you mean {quoted(meant)}?" if meant else f"there are {', '.join(routes)}"
    more = f", also on {len(lines) - 1} more lines, to line {lines[-1]}" if len(lines) > 1 else ""
    return f"there is no route {quoted(name)}{more}; {mend}"


def printable(text: str) -> str:
    """A foreign text on one line, with nothing in it that a terminal or a browser obeys."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character.isprintable() or character == _JOINER:
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"


def sample(prompts: Sequence[Prompt], limit: int | None) -> tuple[Prompt, ...]:
    """At most `limit` of them, drawn evenly over the file: files are often sorted by route.

    The same ones each time, in their own order.
    """
    if limit is None or limit >= len(prompts):
        return tuple(prompts)
    chosen = random.Random(_SEED).sample(range(len(prompts)), limit)  # noqa: S311  no secret
    return tuple(prompts[index] for index in sorted(chosen))
