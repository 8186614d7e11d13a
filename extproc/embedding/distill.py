"""Writes the static encoder's table from the default model's weights; it runs no model and serves nobody.

    python -m extproc.embedding.distill CACHE_DIR

In the default model, only three n-gram branches look at a token's neighbours; everything else of a token's
features is its own. Here a neighbour is replaced by what it is on average, over the unigram distribution
that sp.model holds: its mean in each product, and through each rectifier its variance too. What is left
depends on one piece alone, so one pass over the vocabulary gives a table. The first products of the
feed-forward net are linear in the sum over tokens and are folded in. Measured against the model's output
for single pieces (as model2vec does) and a linear map of its input embeddings: the best route of the full
encoder is found for 80 to 95 % of prompts, against 59 to 91 and 56 to 90 %, and in a tenth of the time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from extproc.embedding.cache import Progress, build_into, intact_digest, locked
from extproc.embedding.graph import BRANCH_WIDTH, BRANCHES, DIMENSION, TABLE_CHUNKS
from extproc.embedding.model import ModelError, default_tokenizer, default_weights
from extproc.embedding.static import (
    ARRAYS,
    GROUP,
    HALF,
    RANK,
    ZERO,
    StaticEncoder,
    StaticFiles,
    find_static,
    table_path,
)

_SAMPLE: Final = 4_096
"""Pieces that stand for the neighbours a piece may have, or for all that the basis must fit."""
_LEAST_SCALE: Final = 1e-4
"""A coordinate of a millionth of the usual is 0; float16 has no smaller steps worth having."""
_CHUNK: Final = 512
"""Pieces at a time: their activations fit the processor's cache."""
_BUSY_NICE: Final = 19

Array = NDArray[np.float32]

_SELF_TEST: Final = (
    ("How do I fix this compiler error?", "My program does not compile", "Book a table for two"),
    ("帮我修复这个编译错误", "我的程序编译失败了，怎么办？", "今天晚上吃什么好"),
    ("How do I fix this compiler error?", "怎么修复这个编译错误？", "今天晚上吃什么好"),
)
"""A text, one that means the same, one that does not."""
_MARGIN: Final = 0.1


def ensure_static(cache_dir: Path, *, progress: Progress) -> StaticFiles:
    """The table, built unless it is there: some seconds of one core, 250 MB of memory. Raises ModelError."""
    if (found := find_static(cache_dir)) is not None:
        return found
    path = table_path(cache_dir)
    tokenizer, weights = default_tokenizer(), default_weights()
    try:
        with locked(path, progress):
            digest = intact_digest(path)
            if digest is None:
                started_s = time.monotonic()
                digest = build_into(path, lambda out: write_table(weights, tokenizer, out))
                progress(f"static encoder built in {time.monotonic() - started_s:.1f} s")
    except OSError as error:
        raise ModelError(
            f"{error.filename or path}: {error.strerror or error}; free some space (40 MB) or set "
            "POINTSMAN_CACHE to a folder that can be written"
        ) from error
    return StaticFiles(path, tokenizer, digest)


def write_table(weights: Path, tokenizer: Path, out: Path) -> None:
    """Distil, write and test; raises ModelError when the result is useless."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    network = _Network(weights)
    chances = _chances(pieces)
    draw = np.random.default_rng(0).choice
    network.average_neighbours(draw(len(chances), _SAMPLE, p=chances / chances.sum()))
    # Between a piece that is everywhere and one that is nowhere: both have to fit.
    flat = np.sqrt(chances)
    mean, basis = _basis(network.rows(draw(len(flat), _SAMPLE, p=flat / flat.sum())))
    count = pieces.get_piece_size()
    scale = np.empty((count, RANK // GROUP), np.float16)
    marks = network.rows(np.array([pieces.bos_id(), pieces.eos_id()]))
    with out.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (count, HALF)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, _CHUNK):
            rows = network.rows(np.arange(start, min(start + _CHUNK, count)))
            packed, scale[start : start + len(rows)] = _packed((rows - mean) @ basis.T)
            file.write(packed.tobytes())
        arrays = network.feed_forward | {"bos": marks[0], "eos": marks[1], "scale": scale}
        arrays |= {"basis": basis, "mean": mean}
        for name in ARRAYS:
            np.lib.format.write_array(file, arrays[name], (1, 0), allow_pickle=False)
    _check(StaticEncoder(StaticFiles(out, tokenizer, "")))


def _basis(rows: Array) -> tuple[Array, Array]:
    """Mean of the rows, and their first RANK principal axes, one a row."""
    mean = np.asarray(rows.mean(axis=0), np.float32)
    _, axes = np.linalg.eigh(np.cov((rows - mean).T))
    return mean, np.ascontiguousarray(axes[:, : -RANK - 1 : -1].T, np.float32)


def _packed(
    coordinates: NDArray[np.floating[Any]],
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """As static.py reads them: two a byte, and the scale of each group."""
    groups = coordinates.reshape(len(coordinates), -1, GROUP)
    scale = np.maximum(np.abs(groups).max(axis=2) / 7, _LEAST_SCALE).astype(np.float16)
    levels = np.rint(groups / scale[:, :, None].astype(np.float32)).clip(-7, 7) + ZERO
    codes = levels.reshape(len(coordinates), RANK).astype(np.uint8)
    return codes[:, :HALF] | codes[:, HALF:] << 4, scale


def _chances(pieces: sentencepiece.SentencePieceProcessor) -> NDArray[np.float64]:
    """How often each piece occurs: its score is the log-probability of a unigram model."""
    scores = np.array([pieces.get_score(i) for i in range(pieces.get_piece_size())])
    return np.where(scores < 0, np.exp(scores), 0.0)  # marks and reserved pieces have 0


class _Network:
    """The model without context. Mutable: `_around`, once, by `average_neighbours`."""

    def __init__(self, weights: Path) -> None:
        with np.load(weights, allow_pickle=False) as archive:
            self._w = {key: archive[key] for key in archive.files if not _is_table(key)}
            first = archive["q1"]
            self._table = np.empty((TABLE_CHUNKS * len(first), DIMENSION), np.uint8)
            for chunk in range(TABLE_CHUNKS):  # one at a time: the whole is 65 MB
                self._table[chunk::TABLE_CHUNKS] = archive[f"q{chunk + 1}"]
        self._fold = np.concatenate([self._w["d0"], self._w["p1"]], axis=1)
        self._around: dict[tuple[int, int], tuple[Array, Array]] = {}
        self.width = self._fold.shape[1]
        self.feed_forward = {key: self._w[key] for key in ("d1", "d2", "p3", "d3")}

    def average_neighbours(self, sample: NDArray[np.int64]) -> None:
        """Mean and deviation of what neighbours add, for each layer of each branch."""
        shuffle = np.random.default_rng(1).permutation
        projected = self._projections(self._embedded(sample))
        for branch, hidden in zip(BRANCHES, projected, strict=True):
            x = hidden
            for layer in (1, 2):
                taps, bias = self._taps(layer, branch.taps)
                added = [x @ tap for at, tap in enumerate(taps) if at != branch.left]
                mean = np.sum([each.mean(axis=0) for each in added], axis=0)
                deviation = np.sqrt(np.sum([each.var(axis=0) for each in added], axis=0))
                self._around[layer, branch.taps] = (mean, np.maximum(deviation, 1e-6))
                # The next layer's neighbours have had neighbours of their own.
                own = x @ taps[branch.left] + bias
                x = x + np.maximum(sum((each[shuffle(len(x))] for each in added), own), 0)

    def rows(self, pieces: NDArray[np.int64]) -> Array:
        """What each piece adds to a sentence, as input of the feed-forward net's second layer."""
        embedded = self._embedded(pieces)
        features = [embedded]
        for branch, hidden in zip(BRANCHES, self._projections(embedded), strict=True):
            x = hidden
            for layer in (1, 2):
                taps, bias = self._taps(layer, branch.taps)
                mean, deviation = self._around[layer, branch.taps]
                x = x + _expected_relu(x @ taps[branch.left] + (bias + mean), deviation)
            features.append(x)
        normed = self._norm(np.concatenate(features, axis=1), self._w["ln_g"], self._w["ln_b"])
        return np.asarray((normed @ self._w["cnn_W"] + self._w["cnn_b"]) @ self._fold, np.float32)

    def _embedded(self, pieces: NDArray[np.int64]) -> Array:
        chunk = pieces % TABLE_CHUNKS
        levels = self._table[pieces].astype(np.float32)
        values = levels * self._w["scale"][chunk, None] + self._w["lo"][chunk, None]
        return np.asarray(values, np.float32)

    def _projections(self, embedded: Array) -> list[Array]:
        """The input of each branch. Here alone the model norms over all branches together."""
        w = self._w
        joined = [embedded @ w[f"proj{each.taps}"] + w[f"proj_b{each.taps}"] for each in BRANCHES]
        gain, bias = (
            np.concatenate([w[f"{key}{each.taps}"] for each in BRANCHES])
            for key in ("ln_g", "ln_b")
        )
        return np.split(self._norm(np.concatenate(joined, axis=1), gain, bias), len(BRANCHES), 1)

    def _taps(self, layer: int, taps: int) -> tuple[Array, Array]:
        """The convolution's matrix for each place of the window, and its bias."""
        weight = self._w[f"w{layer}_{taps}"].reshape(taps, BRANCH_WIDTH, BRANCH_WIDTH)
        return weight, self._w[f"b{layer}_{taps}"]

    def _norm(self, x: Array, gain: Array, bias: Array) -> Array:
        x = x - x.mean(axis=1, keepdims=True)
        variance = np.square(x).mean(axis=1, keepdims=True) + np.float32(self._w["eps"])
        return np.asarray(x / np.sqrt(variance) * gain + bias, np.float32)


def _is_table(key: str) -> bool:
    return key[0] == "q" and key[1:].isdigit()


def _expected_relu(mean: Array, deviation: Array) -> Array:
    """E max(0, X) for X about normal: a parabola between +-1.6 deviations, exact beyond.

    Its tails must end: one that does not, summed over all channels, cost 0.15 of cosine.
    """
    reach = np.float32(1.6) * deviation
    inside = np.square(np.clip(mean + reach, 0, 2 * reach)) / (4 * reach)
    return np.asarray(inside + np.maximum(mean - reach, 0), np.float32)


def _check(encoder: StaticEncoder) -> None:
    for text, paraphrase, other in _SELF_TEST:
        x, near, far = (encoder.encode(each)[0] for each in (text, paraphrase, other))
        margin = float(x @ near - x @ far)
        if not margin >= _MARGIN:
            raise ModelError(f"the static encoder fails its self-test: {margin:.2f} on {text!r}")


def main(argv: list[str], *, nice: Callable[[int], int] = os.nice) -> int:
    nice(_BUSY_NICE)  # requests come first
    try:
        ensure_static(Path(argv[0]), progress=print)
    except ModelError as error:
        print(error)  # noqa: T201  the last line says what failed
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
