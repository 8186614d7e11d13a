"""OpenAI-shaped request bodies: what they ask for, the text to route by, and `model` replaced in place.

Bytes in, bytes out. Nothing but the value of the top-level `model` ever changes: a body is never
re-serialised, so 64-bit integers, duplicate keys, escapes and white space survive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from extproc.core.errors import (
    DUPLICATE_MODEL,
    EMPTY_BODY,
    INVALID_JSON,
    INVALID_MESSAGES,
    INVALID_MODEL,
    NOT_AN_OBJECT,
    ErrorKind,
)

PROMPT_EDGE_CHARS: Final = 2048
"""Characters kept from each end of a prompt: tokenisers read everything first, so cut before."""

_MEMBERS: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])
_STRING: Final = msgspec.json.Decoder(str)
_ANY: Final = msgspec.json.Decoder(Any)

_SPACE: Final = rb"[ \t\r\n]*+"
_OPEN: Final = re.compile(_SPACE + rb"\{" + _SPACE)
_KEY: Final = re.compile(
    rb'"((?:[^"\\]++|\\.)*+)"' + _SPACE + rb":" + _SPACE,
    re.DOTALL,
)
_COMMA: Final = re.compile(_SPACE + rb"," + _SPACE)
# Strings whole, or one bracket: what is needed to find the end of a container.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_SCALAR: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\s,\]}]++', re.DOTALL)
_AFTER_VALUE: Final = frozenset(b" \t\r\n,}")
# A lone surrogate: an escaped high half without its low half, or a low half by itself.
_LONE_SURROGATE: Final = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)


class BodyError(Exception):
    """A body that cannot be routed; `kind` is what to tell the client."""

    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind.code)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Body:
    """A request body that is one JSON object. Offsets are bytes into `raw`."""

    raw: bytes
    members: dict[str, Raw]
    """The last value of each top-level key, as JSON text."""
    model: str | None
    """None: absent or null."""
    model_start: int
    """Where the model's value stands, or where a model member may be inserted."""
    model_end: int

    @property
    def stream(self) -> bool:
        raw = self.members.get("stream")
        return raw is not None and bytes(raw) == b"true"

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
    text, members = _decode_members(raw)
    start, end = _model_span(text, members)
    messages = members.get("messages")
    if messages is not None and memoryview(messages)[0] != ord("["):
        raise BodyError(INVALID_MESSAGES)
    model: str | None = None
    value = members.get("model")
    if value is not None and bytes(value) != b"null":
        try:
            model = _STRING.decode(value)
        except msgspec.DecodeError as error:
            raise BodyError(INVALID_MODEL) from error
        if not model:
            raise BodyError(INVALID_MODEL)
    return Body(raw, members, model, start, end)


def with_model(body: Body, model: str) -> Rewritten:
    """The same bytes with `model` as the value of the top-level `model`, inserted where absent."""
    value = msgspec.json.encode(model)
    offset = body.model_start
    inserted = value
    if not body.has_model_member:
        key = b'"model":'
        inserted = key + value + (b"," if body.members else b"")
        offset += len(key)
    raw = b"".join((body.raw[: body.model_start], inserted, body.raw[body.model_end :]))
    return Rewritten(raw, offset, len(value))


def prompt_text(body: Body) -> str:
    """The text to route by: the last user message that has text, or the prompt; "" when none.

    Bounded: beyond 2 x PROMPT_EDGE_CHARS the middle is cut out, leaving a paragraph break. Raise
    BodyError when `messages` is not a list of objects.
    """
    if (messages := body.members.get("messages")) is not None:
        return _cut(_last_user_text(messages))
    for key in ("prompt", "input"):
        if (value := body.members.get(key)) is not None:
            return _cut(_plain_text(value))
    return ""


def _decode_members(raw: bytes) -> tuple[bytes, dict[str, Raw]]:
    """The members, and the text they are views of: `raw`, or a copy of the same length."""
    try:
        return raw, _MEMBERS.decode(raw)
    except msgspec.ValidationError as error:
        raise BodyError(NOT_AN_OBJECT) from error
    except RecursionError as error:
        raise BodyError(INVALID_JSON) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # RFC 8259, section 8.2, allows lone surrogate escapes and msgspec refuses them. They are
        # replaced, byte for byte, in a copy that serves only to find positions and text.
        text = _LONE_SURROGATE.sub(lambda found: found[1] or b"\\ufffd", raw)
        if text == raw:
            raise BodyError(INVALID_JSON) from error
        try:
            return text, _MEMBERS.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as second:
            raise BodyError(INVALID_JSON) from second


def _model_span(text: bytes, members: dict[str, Raw]) -> tuple[int, int]:
    """Where the value of `model` stands; (p, p) where it may be inserted when there is none.

    Walks the top level only. The end of a value is known from its decoded view, except for a value
    that a later duplicate of its key shadows.
    """
    opening = _OPEN.match(text)
    assert opening is not None  # the decoder accepted it
    insert_at = opening.end()
    found: tuple[int, int] | None = None
    position = insert_at
    while (key := _KEY.match(text, position)) is not None:
        name = _key_text(key[1])
        start = key.end()
        value = members[name]
        end = start + len(memoryview(value))
        # A complete value is never a prefix of another one, but for numbers: 1 and 12.
        if not (text.startswith(value, start) and text[end] in _AFTER_VALUE):
            end = _skip_value(text, start)
        if name == "model":
            if found is not None:
                raise BodyError(DUPLICATE_MODEL)
            found = (start, end)
        comma = _COMMA.match(text, end)
        if comma is None:
            break
        position = comma.end()
    return found or (insert_at, insert_at)


def _key_text(key: bytes) -> str:
    if b"\\" in key:
        return _STRING.decode(b'"' + key + b'"')
    return key.decode()


def _skip_value(text: bytes, start: int) -> int:
    """The end of a valid JSON value that starts at `start`."""
    if text[start] not in b"[{":
        scalar = _SCALAR.match(text, start)
        assert scalar is not None
        return scalar.end()
    depth = 0
    for token in _TOKEN.finditer(text, start):
        first = text[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
            if depth == 0:
                return token.end()
    raise BodyError(INVALID_JSON)


def _last_user_text(messages: Raw) -> str:
    try:
        items = _LIST.decode(messages)
    except msgspec.DecodeError as error:
        raise BodyError(INVALID_MESSAGES) from error
    if any(memoryview(item)[0] != ord("{") for item in items):
        raise BodyError(INVALID_MESSAGES)
    for item in reversed(items):
        message = _decode_any(item)
        if message.get("role") == "user" and (text := _content_text(message.get("content"))):
            return text
    return ""


def _plain_text(value: Raw) -> str:
    """`prompt` (a string or a list of strings) or `input` (also a list of messages)."""
    content = _decode_any(value)
    if isinstance(content, list):
        messages = [item for item in content if isinstance(item, dict)]
        for message in reversed(messages):
            if message.get("role", "user") == "user" and (
                text := _content_text(message.get("content"))
            ):
                return text
    return _content_text(content)


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n\n".join(_text_parts(content))
    return ""


def _text_parts(parts: Iterable[Any]) -> Iterable[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _decode_any(value: Raw) -> Any:
    try:
        return _ANY.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Positions were found without looking into strings: an invalid one shows only here.
        raise BodyError(INVALID_JSON) from error


def _cut(text: str) -> str:
    if len(text) <= 2 * PROMPT_EDGE_CHARS:
        return text
    return text[:PROMPT_EDGE_CHARS] + "\n\n" + text[-PROMPT_EDGE_CHARS:]
