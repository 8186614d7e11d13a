"""Text to vectors in a fraction of a millisecond from a table; it knows no runtime and no process.

The table (distill.py writes it) holds what each piece of the default model's vocabulary adds to a
sentence when its neighbours are not looked at: coordinates in a basis of fewer dimensions than the net
is wide, 4 bits each, with a scale for every 32 of them. A sentence is their sum, over the root of their
number, through the model's own feed-forward net. Chinese works as it does there. The vectors live near
those of the full encoder (cosine 0.88 on average) and are still not comparable with them: each has its
own index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from extproc.embedding.cache import intact_digest
from extproc.embedding.model import ModelError, default_tokenizer, default_version
from extproc.embedding.text import lines, paragraphs

_VERSION: Final = 2
"""Raise it with every change here or in distill.py that changes a result, and with the weights: caches are
keyed by it, and lower ones are removed."""

MAX_CHARS: Final = 1_200
"""Both ends of a longer text are cut to half of it: whatever they hold, they are tokenised in 0.3 ms."""
MAX_PIECES: Final = 254
END_PIECES: Final = 126
"""The full encoder's limits without its two marks."""

ARRAYS: Final = ("scale", "basis", "mean", "bos", "eos", "d1", "d2", "p3", "d3")
"""What follows the table in its file, in this order; `d1` and the rest bear the names of graph.py."""
FIRST: Final = 320
"""Columns of a sentence that feed the first layer; the others go past it."""
RANK: Final = 416
"""Coordinates of a piece: of 640 columns these many, in the right basis, keep a cosine of 0.99."""
GROUP: Final = 32
"""Coordinates with one scale; a single one for all of a piece costs ten times the error."""
HALF: Final = RANK // 2
"""Bytes of a piece: coordinate j in the low four bits of byte j, or in the high ones of j - HALF."""
ZERO: Final = 8
"""What a coordinate of 0 is stored as; they run from -7 to 7."""
_AT_ONCE: Final = 1_024
"""Pieces that are unpacked together, 1.7 MB of coordinates: more of them leave the cache."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """A table that passed its checks, and the tokeniser whose pieces its rows belong to."""

    table: Path
    tokenizer: Path
    digest: str


def table_path(cache_dir: Path) -> Path:
    return cache_dir / f"static-m3-{default_version()}-v{_VERSION}.table"


def find_static(cache_dir: Path) -> StaticFiles | None:
    """The table if it is there and whole. Blocks for 0.1 s; raises ModelError without the tokeniser."""
    path = table_path(cache_dir)
    digest = intact_digest(path)
    return None if digest is None else StaticFiles(path, default_tokenizer(), digest)


class StaticEncoder:
    """Never changes after loading; `encode` may run in any thread."""

    def __init__(self, files: StaticFiles) -> None:
        """Load; the table stays in its file, mapped. Raises ModelError."""
        try:
            self._tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(files.tokenizer))
            with files.table.open("rb") as file:
                self._table = np.asarray(_map(file))  # rows of a memmap would be memmaps
                arrays = {name: _read(file) for name in ARRAYS}
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{files.table}: cannot be loaded: {error}; delete it") from error
        self._scale = arrays["scale"]
        self._basis, self._mean = arrays["basis"], arrays["mean"]
        self._marks = arrays["bos"] + arrays["eos"]
        self._d1, self._d2, self._p3, self._d3 = (arrays[key] for key in ("d1", "d2", "p3", "d3"))

    def encode(self, text: str) -> Vectors:
        """Of one text; see `encode_all`."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Vectors]:
        """Of each text [k, 512], L2-normalised: k = 1, or 2 for the first and last part of a long one.

        Any str is safe, and a text of any length costs less than a millisecond; of many short ones
        each costs half, since most of one alone is reading the net and calling numpy.
        """
        parts = [self._parts(text) for text in texts]
        vectors = self._through(self._sums([ids for part in parts for ids in part]))
        return np.split(vectors, np.cumsum([len(part) for part in parts])[:-1])

    def _parts(self, text: str) -> list[list[int]]:
        """The pieces of each part of a text that gets a vector of its own."""
        if len(text) > MAX_CHARS:
            text = f"{text[: MAX_CHARS // 2]}\n\n{text[-MAX_CHARS // 2 :]}"
        text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate would raise
        ids = self._tokenize(text)
        if len(ids) <= MAX_PIECES:
            return [ids]
        parts = paragraphs(text)
        head = self._tokenize_end(parts[0], 0)[:END_PIECES]
        tail = self._tokenize_end(parts[-1], -1)[-END_PIECES:]
        return [head, tail]

    def _tokenize_end(self, paragraph: str, index: int) -> list[int]:
        ids = self._tokenize(paragraph)
        return ids if len(ids) <= END_PIECES else self._tokenize(lines(paragraph)[index])

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids or [self._tokenizer.unk_id()]

    def _sums(self, parts: Sequence[list[int]]) -> Vectors:
        """The sentences before the feed-forward net, marks included: a row each, as wide as it."""
        counts = np.array([len(ids) for ids in parts], np.float32)[:, None]
        total = self._coordinates(parts) @ self._basis + counts * self._mean + self._marks
        return np.asarray(total / np.sqrt(counts + 2), np.float32)

    def _coordinates(self, parts: Sequence[list[int]]) -> Vectors:
        """The sum of each part's pieces, [parts, RANK]."""
        sums = np.empty((len(parts), RANK // GROUP, GROUP), np.float32)
        first = 0
        while first < len(parts):
            last = first
            ids: list[int] = []
            while last < len(parts) and (not ids or len(ids) + len(parts[last]) <= _AT_ONCE):
                ids += parts[last]
                last += 1
            packed, scale = self._table[ids], self._scale[ids]
            levels = np.empty((len(ids), RANK), np.float32)
            levels[:, :HALF], levels[:, HALF:] = packed & 15, packed >> 4
            # For each group, its scales times its levels, over all pieces of a part at once.
            grouped = levels.reshape(len(ids), RANK // GROUP, GROUP).transpose(1, 0, 2)
            scales = scale.T[:, None, :]
            begin = 0
            for part in range(first, last):
                end = begin + len(parts[part])
                sums[part] = np.matmul(scales[:, :, begin:end], grouped[:, begin:end])[:, 0]
                sums[part] -= ZERO * scale[begin:end].sum(0)[:, None]
                begin = end
            first = last
        return sums.reshape(len(parts), RANK)

    def _through(self, x: Vectors) -> Vectors:
        """The model's feed-forward net from its second layer on (graph.py, `_feed_forward`)."""
        y1 = _relu(x[:, FIRST:] + _relu(x[:, :FIRST]) @ self._d1)
        y = np.tanh(y1 @ self._p3 + _relu(y1 @ self._d2) @ self._d3)
        norms = np.linalg.norm(y, axis=1, keepdims=True)
        return np.asarray(y / np.maximum(norms, np.float32(1e-6)), np.float32)


def _relu(x: Vectors) -> Vectors:
    return np.maximum(x, np.float32(0))


def _map(file: BinaryIO) -> NDArray[np.uint8]:
    """The first array, mapped read-only; the file stands behind it then."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not a table of this version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype != np.uint8 or len(shape) != 2 or shape[1] != HALF:
        raise ValueError(f"a table of {dtype} {shape}")
    offset = file.tell()
    table = np.memmap(file, np.uint8, "r", offset, shape)
    file.seek(offset + table.nbytes)
    return table


def _read(file: BinaryIO) -> Vectors:
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False), np.float32)
