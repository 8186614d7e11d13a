"""One OpenAI-compatible embeddings service over HTTP: texts in, unit vectors or why not out; no queue.

The protocol is OpenAI's `POST /v1/embeddings`, as TEI, vLLM, Infinity, llama.cpp and Ollama speak it.
"""

from __future__ import annotations

import asyncio
import binascii
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

_ANSWER_BYTES: Final = 64 << 10
_ANSWER_BYTES_EACH: Final = 256 << 10
"""An answer may have so many bytes, and so many for each text: 8,192 numbers written out."""
_WIDE_BYTES: Final = 1 << 20
_DETAIL_BYTES: Final = 2_000
_DETAIL_CHARS: Final = 200
_KEEP_ALIVE_S: Final = 30.0
_TRIES: Final = 2


class Fault(StrEnum):
    """Why a call gave nothing: a metric label."""

    TIMEOUT = "timeout"
    SERVER_ERROR = "5xx"
    CONNECT_ERROR = "connect_error"
    RATE_LIMITED = "rate_limited"
    BAD_SCHEMA = "bad_schema"
    REFUSED = "refused"
    """A status that is neither 200, 429 nor 5xx: what was sent is at fault, or the key, or the path."""


@dataclass(frozen=True, slots=True)
class Failure:
    fault: Fault
    words: str
    """Safe to log."""
    detail: str = ""
    """The service's own words, which may quote a text."""


class Service:
    """Mutable: `_session`; `_format`, from base64 to float for good where the service wants that."""

    def __init__(
        self, url: str, *, model: str | None, key: str | None, dimensions: int | None
    ) -> None:
        self.url = url
        self._dimensions = dimensions
        # Plain answers only: an unpacked one could be of any size.
        self._headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "pointsman",
        }
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        asked = {"model": model, "dimensions": dimensions}
        self._asked = {name: value for name, value in asked.items() if value is not None}
        self._format = "base64"
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """On the loop that will call."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers=self._headers,
            auto_decompress=False,
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def embed(self, texts: Sequence[str], *, timeout_s: float) -> Vectors | Failure:
        """[len(texts), dimension], L2-normalised; never later than `timeout_s`, connecting included."""
        try:
            async with asyncio.timeout(timeout_s):
                form = self._format  # another call may change it before this one is refused
                result = await self._ask(texts, form)
                if _dislikes_base64(result, form):
                    result = await self._ask(texts, "float")
                    if not isinstance(result, Failure):
                        self._format = "float"
                return result
        except TimeoutError:
            return Failure(Fault.TIMEOUT, f"no answer within {timeout_s * 1e3:g} ms")

    async def _ask(self, texts: Sequence[str], form: str) -> Vectors | Failure:
        asked = {"input": texts, "encoding_format": form, **self._asked}
        body = msgspec.json.encode(asked)
        for tries_left in reversed(range(_TRIES)):
            try:
                return await self._post(body, len(texts))
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # A kept-alive connection that the service closes as we write: what is lost is nobody's
                # fault, and to embed twice does no harm. A refused connection is no such race.
                if isinstance(error, aiohttp.ClientConnectorError) or not tries_left:
                    return Failure(Fault.CONNECT_ERROR, _reason(error))
            except aiohttp.ClientError as error:
                return Failure(Fault.CONNECT_ERROR, _reason(error))
        raise AssertionError  # the last try returns

    async def _post(self, body: bytes, count: int) -> Vectors | Failure:
        assert self._session is not None
        # A redirect would take the key elsewhere.
        async with self._session.post(self.url, data=body, allow_redirects=False) as response:
            if response.status != 200:
                detail = await response.content.read(_DETAIL_BYTES)
                return _refusal(response.status, detail)
            answer = bytearray()
            limit = _ANSWER_BYTES + count * _ANSWER_BYTES_EACH
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > limit:
                    return Failure(Fault.BAD_SCHEMA, f"an answer of more than {limit} bytes")
        # A wide one would keep the loop for tenths of a second.
        wide = len(answer) > _WIDE_BYTES
        read = bytes(answer)
        result = (
            await asyncio.to_thread(read_answer, read, count) if wide else read_answer(read, count)
        )
        if isinstance(result, Failure) or self._dimensions in (None, result.shape[1]):
            return result
        words = f"vectors of {result.shape[1]} columns, though asked for {self._dimensions}"
        return Failure(Fault.BAD_SCHEMA, words)


def _refusal(status: int, detail: bytes) -> Failure:
    fault = Fault.REFUSED
    if status == 429:
        fault = Fault.RATE_LIMITED
    elif status >= 500:
        fault = Fault.SERVER_ERROR
    words = " ".join(detail.decode("utf-8", "replace").split())
    return Failure(fault, f"status {status}", words[:_DETAIL_CHARS])


def _dislikes_base64(result: Vectors | Failure, form: str) -> bool:
    """Some services know floats only, and say so with a 400 or 422."""
    return (
        isinstance(result, Failure)
        and form == "base64"
        and result.fault is Fault.REFUSED
        and ("base64" in result.detail or "encoding_format" in result.detail)
    )


def _reason(error: Exception) -> str:
    """Of a connection: the system's words, without addresses and objects."""
    inner = getattr(error, "os_error", None) or error
    number = getattr(inner, "errno", None)
    if number is not None and number > 0:
        return os.strerror(number)
    return (
        getattr(inner, "strerror", None) or type(error).__name__
    )  # a name that resolves to nothing


# --- what it answers ---------------------------------------------------------------------------------


class _Item(msgspec.Struct):
    embedding: list[float] | str
    index: int | None = None


class _Answer(msgspec.Struct):
    data: list[_Item]


_decoder: Final = msgspec.json.Decoder(_Answer)


def read_answer(answer: bytes, count: int) -> Vectors | Failure:
    """The vectors in the order of the texts, checked. 32 x 1,024: 0.6 ms, and 2.1 ms as floats."""
    try:
        items = _decoder.decode(answer).data
        rows = [_row(item.embedding) for item in _in_order(items, count)]
    except (msgspec.MsgspecError, RecursionError):
        return Failure(Fault.BAD_SCHEMA, "no JSON object with data, index and embedding")
    except ValueError as error:
        return Failure(Fault.BAD_SCHEMA, str(error))
    if len({len(row) for row in rows}) != 1:
        return Failure(Fault.BAD_SCHEMA, "vectors of different lengths")
    with np.errstate(over="ignore"):
        vectors: NDArray[np.float32] = np.array(rows, np.float32)
    if 0 in vectors.shape:
        return Failure(Fault.BAD_SCHEMA, "an empty vector")
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not np.isfinite(norms).all() or not norms.all():
        return Failure(Fault.BAD_SCHEMA, "a vector that is zero or not finite")
    unit: Vectors = np.ascontiguousarray(vectors / norms, np.float32)
    unit.flags.writeable = False
    return unit


def _in_order(items: list[_Item], count: int) -> list[_Item]:
    if len(items) != count:
        raise ValueError(f"{len(items)} vectors for {count} texts")
    if all(item.index is None for item in items):
        return items
    by_index = {item.index: item for item in items}
    if by_index.keys() != set(range(count)):
        raise ValueError(f"indexes that are not those of {count} texts")
    return [by_index[index] for index in range(count)]


def _row(embedding: list[float] | str) -> Vectors | list[float]:
    if isinstance(embedding, list):
        return embedding
    try:
        data = binascii.a2b_base64(embedding.encode(), strict_mode=True)
    except binascii.Error:
        raise ValueError("a vector that is not base64") from None
    if len(data) % 4:
        raise ValueError("a vector that is not of 32-bit floats")
    return np.frombuffer(data, "<f4")
