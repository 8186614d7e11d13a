"""What a scripted upstream says, in the bytes of the OpenAI wire format; it knows no socket."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, AnyStr, Final

import msgspec

from extproc.demo.faults import BadSchema

if TYPE_CHECKING:
    from collections.abc import Mapping

ECHO_CHARACTERS: Final = 60
PIECES: Final = 8
"""Content chunks of a stream, and pieces of a JSON body that is sent slowly or cut."""


class Endpoint(StrEnum):
    """What was asked, whatever prefix stands before it in the path."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    EMBEDDINGS = "/v1/embeddings"
    GENERATE = "/generate"


def endpoint_of(path: str) -> Endpoint | None:
    return next((endpoint for endpoint in Endpoint if path.endswith(endpoint)), None)


@dataclass(frozen=True, slots=True)
class Ask:
    """The parts of a request body that shape the answer."""

    endpoint: Endpoint
    model: str | None
    text: str
    inputs: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


def parse_ask(endpoint: Endpoint, body: bytes) -> Ask:
    """Read a request body; raises ValueError with what a provider would say about a bad one."""
    try:
        # The standard parser: it takes lone surrogates and repeated keys, as providers do.
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("We could not parse the JSON body of your request.") from None
    if not isinstance(document, dict):
        raise ValueError("The JSON body must be an object.")  # noqa: TRY004  one kind of refusal
    model = document.get("model")
    inputs = _inputs(document.get("input")) if endpoint is Endpoint.EMBEDDINGS else ()
    messages = document.get("messages") if endpoint is Endpoint.CHAT else None
    if endpoint is Endpoint.CHAT and not isinstance(messages, list):
        raise ValueError("'messages' must be a list.")
    text = _last_user_text(messages) if isinstance(messages, list) else document.get("prompt")
    options = document.get("stream_options")
    return Ask(
        endpoint=endpoint,
        model=model if isinstance(model, str) else None,
        text=text if isinstance(text, str) else "",
        inputs=inputs,
        stream=document.get("stream") is True and endpoint in (Endpoint.CHAT, Endpoint.COMPLETION),
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _inputs(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _last_user_text(messages: list[Any]) -> str:
    for message in reversed(messages):
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) else []
        return " ".join(
            str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part
        )
    return ""


def answer_text(upstream: str, ask: Ask) -> str:
    """Who answers, as which model, to what."""
    asked = f"asked as model {ask.model}" if ask.model else "asked without a model"
    start = " ".join(ask.text[: ECHO_CHARACTERS * 4].split())
    echo = start[:ECHO_CHARACTERS] + ("…" if len(start) > ECHO_CHARACTERS else "")
    return _encodable(f"{upstream} here, {asked}: {echo}")


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def json_answer(ask: Ask, text: str, *, serial: int, created_s: int) -> bytes:
    """The whole answer of a request that does not stream."""
    model = _encodable(ask.model or "")
    if ask.endpoint is Endpoint.GENERATE:
        return msgspec.json.encode({"text": text, "model": model})
    if ask.endpoint is Endpoint.EMBEDDINGS:
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(value)}
            for index, value in enumerate(ask.inputs)
        ]
        usage = {"prompt_tokens": len(data), "total_tokens": len(data)}
        return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})
    chat = ask.endpoint is Endpoint.CHAT
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return msgspec.json.encode(
        {
            **_envelope(ask, serial=serial, created_s=created_s),
            "object": "chat.completion" if chat else "text_completion",
            "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "stop"}],
            "usage": _usage(ask, text),
        }
    )


def _envelope(ask: Ask, *, serial: int, created_s: int) -> dict[str, Any]:
    prefix = "chatcmpl" if ask.endpoint is Endpoint.CHAT else "cmpl"
    return {"id": f"{prefix}-{serial}", "created": created_s, "model": _encodable(ask.model or "")}


def _usage(ask: Ask, text: str) -> dict[str, int]:
    asked, said = max(1, len(ask.text) // 4), max(1, len(text) // 4)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _vector(text: str) -> list[float]:
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return [(byte - 127.5) / 128 for byte in digest[:8]]


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events in order: what comes before the content, the content, and the end."""

    head: tuple[bytes, ...]
    content: tuple[bytes, ...]
    tail: tuple[bytes, ...]


def stream_answer(ask: Ask, text: str, *, serial: int, created_s: int) -> EventStream:
    chat = ask.endpoint is Endpoint.CHAT
    envelope = {
        **_envelope(ask, serial=serial, created_s=created_s),
        "object": "chat.completion.chunk" if chat else "text_completion",
        # With include_usage every chunk carries the key, null but for the last.
        **({"usage": None} if ask.include_usage else {}),
    }

    def chunk(said: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return _event(msgspec.json.encode({**envelope, "choices": [choice]}))

    def piece(content: str) -> Mapping[str, Any]:
        return {"delta": {"content": content}} if chat else {"text": content}

    role = (chunk({"delta": {"role": "assistant", "content": ""}}),) if chat else ()
    final = chunk({"delta": {}} if chat else {"text": ""}, "stop")
    usage = {**envelope, "choices": [], "usage": _usage(ask, text)}
    return EventStream(
        head=role,
        content=tuple(chunk(piece(part)) for part in in_pieces(text)),
        tail=(
            final,
            *((_event(msgspec.json.encode(usage)),) if ask.include_usage else ()),
            _event(b"[DONE]"),
        ),
    )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def in_pieces(whole: AnyStr) -> list[AnyStr]:
    """PIECES parts of about the same length; fewer when there is too little to cut."""
    count = min(PIECES, len(whole))
    cuts = [len(whole) * index // count for index in range(count + 1)] if count else []
    return [whole[start:end] for start, end in pairwise(cuts)]


def bad_answer(variant: BadSchema, good: bytes) -> tuple[str, bytes]:
    """(content-type, body) of an answer that claims success and is of no use."""
    match variant:
        case BadSchema.HTML:
            page = b"<html><head><title>502</title></head><body>Bad gateway</body></html>"
            return "text/html; charset=utf-8", page
        case BadSchema.TORN_JSON:
            return "application/json", good[: len(good) // 2]
        case BadSchema.NO_CHOICES:
            return "application/json", b'{"id":"chatcmpl-0","object":"chat.completion"}'
        case BadSchema.EMPTY_CHOICES:
            return (
                "application/json",
                b'{"id":"chatcmpl-0","object":"chat.completion","choices":[]}',
            )


def error_answer(message: str, *, code: str | None, type_: str) -> bytes:
    """The OpenAI-shaped error of a provider; not of the gateway, whose own are in `core.errors`."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": type_, "param": None, "code": code}}
    )


def models_answer(upstream: str) -> bytes:
    model = {"id": upstream, "object": "model", "created": 0, "owned_by": "pointsman-demo"}
    return msgspec.json.encode({"object": "list", "data": [model]})
