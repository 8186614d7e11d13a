"""The frames between the pool and a worker: their types and bytes; no socket, no numpy.

A frame is a big-endian 32-bit length and that many bytes of msgpack. The pool sends `Job`s, one at
a time; the worker sends `Ready` or `Unable` once, then one `Done` or `Failed` for each job.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

HEADER: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = 1 << 20
"""Far above any legal frame: a longer one means that the stream is out of step."""


class Job(msgspec.Struct, array_like=True, frozen=True):
    """One text to embed. Bytes, since a str with a lone surrogate has no msgpack form."""

    id: int
    text: bytes


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """Loaded and warm; `dimension` is what the model really returns."""

    dimension: int


class Unable(msgspec.Struct, array_like=True, frozen=True, tag="unable"):
    """The worker cannot start, in its own words; it exits after this."""

    reason: str


class Done(msgspec.Struct, array_like=True, frozen=True, tag="done"):
    """`rows` float32 vectors, one after the other, and the time it took to make them."""

    id: int
    rows: int
    vectors: bytes
    embed_s: float


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """The encoder raised; the worker lives on."""

    id: int
    reason: str


Reply = Ready | Unable | Done | Failed


class FrameError(Exception):
    """The bytes are no frame: the stream is useless from here on."""


def encode_text(text: str) -> bytes:
    """UTF-8 of any str; a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace")


_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job)
_reply_decoder = msgspec.msgpack.Decoder[Reply](Reply)


def encode(message: Job | Reply) -> bytes:
    payload = _encoder.encode(message)
    return HEADER.pack(len(payload)) + payload


def decode_job(payload: bytes) -> Job:
    return _job_decoder.decode(payload)


class ReplyReader:
    """Replies out of a byte stream cut anywhere. Mutable: `_rest`, the bytes of an unfinished frame."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that `data` completes; raises FrameError."""
        data = self._rest + data if self._rest else data
        replies: list[Reply] = []
        start = 0
        while len(data) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(data, start)
            if size > MAX_FRAME_BYTES:
                raise FrameError(f"frame of {size} bytes")
            end = start + HEADER.size + size
            if len(data) < end:
                break
            try:
                replies.append(_reply_decoder.decode(data[start + HEADER.size : end]))
            except msgspec.MsgspecError as error:
                raise FrameError(str(error)) from error
            start = end
        self._rest = data[start:]
        return replies
