"""The rule answer, in the shapes that clients read; who sends it, and when, is not known here."""

from __future__ import annotations

import re
from typing import Any as Json
from typing import Final

import msgspec

MODEL: Final = "pointsman-rule"
"""The `model` of a rule answer."""

# As RE2 and Python read them alike; the query comes along.
CHAT_PATHS: Final = r"(/.*)?/chat/completions/?(\?.*)?"
COMPLETION_PATHS: Final = r"(/.*)?/(completions|generate)/?(\?.*)?"

_CHAT: Final = re.compile(CHAT_PATHS)
_COMPLETION: Final = re.compile(COMPLETION_PATHS)


def chat(text: str, *, id_: str, created: int, chunk: bool = False) -> dict[str, Json]:
    """A chat completion; `chunk`: as the one chunk of a stream. `id_` is unique, without prefix."""
    choice = {
        "index": 0,
        "delta" if chunk else "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    kind = "chat.completion.chunk" if chunk else "chat.completion"
    return _envelope(kind, f"chatcmpl-{id_}", created, choice)


def completion(text: str, *, id_: str, created: int) -> dict[str, Json]:
    """A text completion, and as well the one chunk of its stream."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}
    return _envelope("text_completion", f"cmpl-{id_}", created, choice)


def _envelope(kind: str, id_: str, created: int, choice: dict[str, Json]) -> dict[str, Json]:
    return {
        "id": id_,
        "object": kind,
        "created": created,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def events(chunk: str) -> str:
    """An event stream that holds one chunk."""
    return f"data: {chunk}\n\ndata: [DONE]\n\n"


def answer(
    path: str, text: str, *, stream: bool, id_: str, created: int
) -> tuple[str, bytes] | None:
    """Content type and body; None on a path where no canned text passes for an answer."""
    if _CHAT.fullmatch(path):
        said = chat(text, id_=id_, created=created, chunk=stream)
    elif _COMPLETION.fullmatch(path):
        said = completion(text, id_=id_, created=created)
    else:
        return None
    body = msgspec.json.encode(said)
    if stream:
        return "text/event-stream", events(body.decode()).encode()
    return "application/json", body
