"""OpenAI-shaped request bodies: what they ask for, the text to route by, and `model` replaced in place.

Bytes in, bytes out. Nothing but the value of the top-level `model` ever changes: a body is never
re-serialised, so 64-bit integers, duplicate keys, escapes and white space survive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec
import numpy as np
from msgspec import Raw

from extproc.core.errors import (
    DUPLICATE_MODEL,
    EMPTY_BODY,
    INVALID_JSON,
    INVALID_MESSAGES,
    INVALID_MODEL,
    NOT_AN_OBJECT,
    TOO_DEEP,
    Content,
    ErrorKind,
)

PROMPT_EDGE_CHARS: Final = 2048
"""Characters kept from each end of a prompt: tokenisers read everything first, so cut before."""

_MOST_PARTS: Final = 512
"""Parts of a list read from each of its ends: one costs far more to read than to skip."""

_MOST_TEXTS: Final = 4096
"""Texts that are counted; each costs a quarter of a microsecond, whatever is in it."""

_ABSENT: Final = Raw(b"")


class _Fields(msgspec.Struct, frozen=True, gc=False):
    """The last value of each top-level key that routing looks at, as JSON text; else _ABSENT.

    The decoder checks all other members and builds nothing of them. A walk over the members in
    Python took up to 1.6 s for 5 MB made for the purpose, and the event loop stood still for it.
    """

    model: Raw = _ABSENT
    messages: Raw = _ABSENT
    prompt: Raw = _ABSENT
    input: Raw = _ABSENT
    stream: Raw = _ABSENT
    images: Raw = _ABSENT
    tools: Raw = _ABSENT
    functions: Raw = _ABSENT


class _Item(msgspec.Struct, frozen=True, gc=False):
    """A message, or a part of one; any key may be missing or of a type that nobody expects."""

    role: Raw = _ABSENT
    content: Raw = _ABSENT
    text: Raw = _ABSENT


_FIELDS: Final = msgspec.json.Decoder(_Fields)
_ITEM: Final = msgspec.json.Decoder(_Item)
_ITEMS: Final = msgspec.json.Decoder(list[_Item])
_LIST: Final = msgspec.json.Decoder(list[Raw])
_STRING: Final = msgspec.json.Decoder(str)

_SPACE: Final = b" \t\r\n"
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_REPLACEMENT: Final = rb"\\ufffd"  # a template, so one backslash: as long as what it replaces


# In JSON a quote without a backslash before it is never part of a string, so these find members and
# nothing that a prompt says. Two, because a search for a literal opening is many times faster.
_IMAGE_PART: Final = re.compile(rb'"type"\s*:\s*"(?:image_url|input_image|image)"')
_IMAGES_MEMBER: Final = re.compile(rb'"images"\s*:\s*\[\s*[^\s\]]')
_FULL_LIST: Final = re.compile(rb"\[\s*[^\s\]]")


class BodyError(Exception):
    """A body that cannot be routed; `kind` is what to tell the client."""

    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind.code)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Body:
    """A request body that is one JSON object. Offsets are bytes into `raw`."""

    raw: bytes
    fields: _Fields
    model: str | None
    """None: absent or null."""
    model_start: int
    """Where the model's value stands, or where a model member may be inserted."""
    model_end: int

    @property
    def stream(self) -> bool:
        return bytes(self.fields.stream) == b"true"

    @property
    def has_model_member(self) -> bool:
        return self.model_end > self.model_start


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A body that names a model; `offset` and `length` are the bytes of the model's JSON value."""

    raw: bytes
    offset: int
    length: int


def parse(raw: bytes) -> Body:
    """Raise BodyError for what is no JSON object, whose `model` is no string or ambiguous, or whose
    `messages` is no list.
    """
    if not raw or raw.isspace():
        raise BodyError(EMPTY_BODY)
    try:
        text, fields = _decode_fields(raw)
        start, end = _model_span(text, fields.model)
    except RecursionError as error:
        raise BodyError(TOO_DEEP) from error
    if fields.messages is not _ABSENT and _first(fields.messages) != b"[":
        raise BodyError(INVALID_MESSAGES)
    model: str | None = None
    if fields.model is not _ABSENT and bytes(fields.model) != b"null":
        try:
            model = _STRING.decode(fields.model)
        except msgspec.DecodeError as error:
            raise BodyError(INVALID_MODEL) from error
        if not model:
            raise BodyError(INVALID_MODEL)
    return Body(raw, fields, model, start, end)


def with_model(body: Body, model: str) -> Rewritten:
    """The same bytes with `model` as the value of the top-level `model`, inserted where absent."""
    value = msgspec.json.encode(model)
    offset = body.model_start
    inserted = value
    if not body.has_model_member:
        key = b'"model":'
        is_empty = body.raw.startswith(b"}", offset)
        inserted = key + value + (b"" if is_empty else b",")
        offset += len(key)
    raw = b"".join((body.raw[: body.model_start], inserted, body.raw[body.model_end :]))
    return Rewritten(raw, offset, len(value))


def prompt_text(body: Body) -> str:
    """The text to route by: the last user message that has text, or the prompt; "" when none.

    Bounded: beyond 2 x PROMPT_EDGE_CHARS the middle is cut out, leaving a paragraph break, and of
    a list of more than 2 x _MOST_PARTS parts the middle is not looked at, nor more user messages
    without text than _MOST_PARTS. Raise BodyError when `messages` is not a list of objects.
    """
    fields = body.fields
    try:
        if fields.messages is not _ABSENT:
            return _cut(_last_user_text(_ITEMS.decode(fields.messages)))
        return _cut(_plain_text(fields.prompt) or _plain_text(fields.input))
    except msgspec.ValidationError as error:
        raise BodyError(INVALID_MESSAGES) from error
    except msgspec.DecodeError as error:
        # Positions were found without looking into strings: an invalid one shows only here.
        raise BodyError(INVALID_JSON) from error
    except RecursionError as error:
        raise BodyError(TOO_DEEP) from error


def text_chars(body: Body, *, enough: int) -> int:
    """Characters of text in all messages, or in the prompt; from `enough` on there may be more.

    Counted from the newest message back, at most _MOST_TEXTS of them. Raise BodyError.
    """
    total = 0
    try:
        for text in islice(_texts(body.fields), _MOST_TEXTS):
            total += len(text)
            if total >= enough:
                break
    except msgspec.DecodeError as error:
        raise BodyError(INVALID_JSON) from error
    return total


def contents(body: Body) -> frozenset[Content]:
    """What else than text there is, in any message: a model that lacks eyes or hands cannot answer.

    Names are looked for as every encoder writes them, without escapes.
    """
    fields = body.fields
    found = set()
    if _is_full(fields.tools) or _is_full(fields.functions):
        found.add(Content.TOOLS)
    if b"image" in body.raw and (
        _is_full(fields.images)
        or any(
            each.search(memoryview(value))
            for each in (_IMAGE_PART, _IMAGES_MEMBER)
            for value in (fields.messages, fields.input)
        )
    ):
        found.add(Content.IMAGES)
    return frozenset(found)


def _is_full(value: Raw) -> bool:
    return _FULL_LIST.match(memoryview(value)) is not None


def _texts(fields: _Fields) -> Iterator[str]:
    """Each text, newest first; an empty one for each message or part that has none."""
    if fields.messages is not _ABSENT:
        for message in reversed(_ITEMS.decode(fields.messages)):
            yield from _content_texts(message.content)
        return
    for value in (fields.prompt, fields.input):
        yield from _content_texts(value)


def _content_texts(content: Raw) -> Iterator[str]:
    """Of a string, of a list of parts, or of a list of messages, as `input` may be."""
    if _first(content) != b"[":
        yield _content_text(content)
        return
    for part in reversed(_parts(content)):
        yield _part_text(part) or (
            _content_text(_ITEM.decode(part).content) if _first(part) == b"{" else ""
        )


def _decode_fields(raw: bytes) -> tuple[bytes, _Fields]:
    """The fields, and the text they are views of: `raw`, or a copy of the same length."""
    try:
        return raw, _FIELDS.decode(raw)
    except msgspec.ValidationError as error:
        raise BodyError(NOT_AN_OBJECT) from error
    except msgspec.DecodeError as error:
        # RFC 8259, section 8.2, allows lone surrogate escapes and msgspec refuses them. All
        # surrogates are replaced, in a copy that serves only to find positions and text.
        text = _SURROGATE.sub(_REPLACEMENT, raw)
        if text == raw:
            raise BodyError(INVALID_JSON) from error
        try:
            return text, _FIELDS.decode(text)
        except msgspec.DecodeError as second:
            raise BodyError(INVALID_JSON) from second


def _model_span(text: bytes, value: Raw) -> tuple[int, int]:
    """Where the value of `model` stands; (p, p) where it may be inserted when there is none."""
    if value is _ABSENT:
        body = text[text.index(b"{") + 1 :]
        at = len(text) - len(body.lstrip(_SPACE))
        return at, at
    start = _address(value) - _address(text)
    end = start + len(memoryview(value))
    assert text[start:end] == bytes(value)  # the decoder gives views, not copies
    before = text[:start].rstrip(_SPACE).removesuffix(b":").rstrip(_SPACE)
    # A key that spells `model`, escaped or not, holds no quote of its own.
    others = before[: before.rindex(b'"', 0, -1)].rstrip(_SPACE)
    # The decoder keeps the last of duplicates, so any other stands among the members before it; in
    # escapes its letters are \u0064 to \u006f.
    if (
        (b'"model"' in others or b"\\u006" in others)
        and others.endswith(b",")
        and _FIELDS.decode(others[:-1] + b"}").model is not _ABSENT
    ):
        raise BodyError(DUPLICATE_MODEL)
    return start, end


def _address(data: bytes | Raw) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _first(value: Raw) -> bytes:
    return bytes(memoryview(value)[:1])


def _last_user_text(messages: Sequence[_Item]) -> str:
    asked = (
        message.content
        for message in reversed(messages)
        if message.content is not _ABSENT and _is_user(message.role)
    )
    return next(filter(None, map(_content_text, islice(asked, _MOST_PARTS))), "")


def _is_user(role: Raw) -> bool:
    spelled = bytes(role)
    if b"\\" in spelled and spelled.startswith(b'"'):
        return _STRING.decode(role) == "user"
    return spelled == b'"user"'


def _plain_text(value: Raw) -> str:
    """`prompt` (a string or a list of strings) or `input` (also a list of messages)."""
    if _first(value) != b"[":
        return _content_text(value)
    parts = _parts(value)
    items = [_ITEM.decode(part) for part in parts if _first(part) == b"{"]
    asked = [each.content for each in items if each.role is _ABSENT or _is_user(each.role)]
    return next(filter(None, map(_content_text, reversed(asked))), "") or _joined(parts)


def _content_text(content: Raw) -> str:
    match _first(content):
        case b'"':
            return _STRING.decode(content)
        case b"[":
            return _joined(_parts(content))
    return ""


def _joined(parts: Iterable[Raw]) -> str:
    return "\n\n".join(filter(None, map(_part_text, parts)))


def _part_text(part: Raw) -> str:
    match _first(part):
        case b'"':
            return _STRING.decode(part)
        case b"{":
            text = _ITEM.decode(part).text
            return _STRING.decode(text) if _first(text) == b'"' else ""
    return ""


def _parts(value: Raw) -> list[Raw]:
    parts = _LIST.decode(value)
    if len(parts) <= 2 * _MOST_PARTS:
        return parts
    return parts[:_MOST_PARTS] + parts[-_MOST_PARTS:]


def _cut(text: str) -> str:
    if len(text) <= 2 * PROMPT_EDGE_CHARS:
        return text
    return text[:PROMPT_EDGE_CHARS] + "\n\n" + text[-PROMPT_EDGE_CHARS:]
