"""Makes a model folder out of an original, or refuses it where the two differ; it knows no torch.

All of it happens in a scratch folder beside the target, which is renamed when everything held.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from extproc.embedding.encoder import Encoder
from extproc.embedding.manifest import (
    FORMAT,
    MANIFEST,
    ONNX,
    TOKENIZER,
    Manifest,
    Parity,
    digests,
    write_manifest,
)
from extproc.embedding.model import ModelError, ModelFiles
from extproc.embedding.quiet import quietly
from extproc.embedding.samples import CHINESE, ENGLISH, ODD, TRIPLES
from extproc.embedding.text import MAX_TOKENS

LEAST_MEAN: Final = 0.98
"""All-MiniLM-L6-v2 with a scale for each tensor instead of each channel had 0.95, and lost prompts."""
LEAST_WORST: Final = 0.95
"""So that one language, or one kind of text, cannot be wrong behind a good mean."""
Precision = Literal["int8", "fp32"]
Vector = NDArray[np.float32]


class Original(Protocol):
    """The model as published."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def pooling(self) -> str: ...

    def encode(self, text: str) -> Vector:
        """[dimension], L2-normalised."""
        ...

    def write(self, folder: Path) -> None:
        """model.onnx, in 32 bits and with pooling inside, and tokenizer.json."""
        ...


class ParityError(ModelError):
    """The exported model's vectors are not the original's."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What came of it."""

    manifest: Manifest
    by_language: dict[str, Parity]
    margins: dict[str, float]
    """By how much a paraphrase is nearer than an unrelated text, by language."""
    size_bytes: int


def check_target(out: Path) -> None:
    """Before the work, not after it. Raises ModelError."""
    if not out.parent.is_dir():
        raise ModelError(f"{out}: there is no folder {out.parent}")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        # A sidecar may be running from it.
        raise ModelError(f"{out}: exists; name a new folder, or remove it first")


def export(
    original: Original,
    out: Path,
    *,
    source: str,
    made_by: str,
    precision: Precision,
    progress: Callable[[str], None],
) -> Exported:
    """Write `out`, whole or not at all. Raises ModelError, or its ParityError."""
    check_target(out)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            progress("tracing the graph")
            original.write(folder)
            if precision == "int8":
                progress("quantising to 8 bits")
                _quantise(folder / ONNX)
            files = _settle(folder, original)
            progress("comparing with the original")
            encoder = Encoder(files)
            by_language, margins = _parity(original, encoder, files), _margins(encoder)
            parity = _joined([*by_language.values()])
            _judge(by_language, parity, precision)
            manifest = Manifest(
                format=FORMAT,
                source=source,
                made_by=made_by,
                dimension=files.dimension,
                max_tokens=original.max_tokens,
                pooling=original.pooling,
                precision=precision,
                parity=parity,
                files=digests(folder),
            )
            write_manifest(folder, manifest)
            size_bytes = _publish(folder, out)
    except OSError as error:
        raise ModelError(
            f"{error.filename or out}: {error.strerror or error}; free some space, or name a folder "
            "that can be written"
        ) from error
    return Exported(manifest, by_language, margins, size_bytes)


def _quantise(path: Path) -> None:
    """Weights of products and tables to 8 bits, a scale for each channel; activations as they come.

    8 by 8 bits need VNNI (Intel since 2019, AMD since Zen 4): older processors saturate their sums.
    """
    from onnxruntime.quantization import (  # noqa: PLC0415  0.5 s that only an export pays
        QuantType,
        quantize_dynamic,
    )

    exact = path.with_name("exact.onnx")
    path.rename(exact)
    try:
        with quietly():  # it advises a step that pays for convolutions
            quantize_dynamic(exact, path, per_channel=True, weight_type=QuantType.QInt8)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelError(f"onnxruntime cannot quantise it: {error}; try --fp32") from error
    exact.unlink()


def _settle(folder: Path, original: Original) -> ModelFiles:
    """Say in the graph what tracing left open: how many columns come out."""
    dimension = len(original.encode(ENGLISH[0]))
    if strays := {path.name for path in folder.iterdir()} - {ONNX, TOKENIZER}:
        raise ModelError(
            f"over 2 GB, in several files ({', '.join(sorted(strays))}): take a smaller model"
        )
    model = onnx.load(str(folder / ONNX))
    (output,) = model.graph.output
    output.type.tensor_type.shape.dim[-1].dim_value = dimension
    onnx.save(model, str(folder / ONNX))
    return ModelFiles(folder / ONNX, folder / TOKENIZER, dimension, "", original.max_tokens)


def _parity(original: Original, encoder: Encoder, files: ModelFiles) -> dict[str, Parity]:
    texts = {
        "English": ENGLISH,
        "Chinese": CHINESE,
        "odd ones": (*ODD, _longest(encoder, min(MAX_TOKENS, files.max_tokens))),
    }
    return {name: _parity_of(original, encoder, own) for name, own in texts.items()}


def _longest(encoder: Encoder, tokens: int) -> str:
    """About as many words as are still one vector: where a limit is wrong, it shows here."""
    words = " ".join(ENGLISH).split() * tokens
    low, high = 1, tokens
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(encoder.encode(" ".join(words[:middle]))) == 1
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(words[:low])


def _parity_of(original: Original, encoder: Encoder, texts: Sequence[str]) -> Parity:
    found = [(text, encoder.encode(text)) for text in texts]
    # Of what is too long for the model, the original takes the beginning, and we take both ends.
    cosines = [float(original.encode(text) @ ours[0]) for text, ours in found if len(ours) == 1]
    return Parity(float(np.mean(cosines)), float(np.min(cosines)), len(cosines))


def _joined(parts: Sequence[Parity]) -> Parity:
    texts = sum(each.texts for each in parts)
    mean = sum(each.mean * each.texts for each in parts) / texts
    return Parity(mean, min(each.min for each in parts), texts)


def _margins(encoder: Encoder) -> dict[str, float]:
    def margin(text: str, same: str, other: str) -> float:
        x, near, far = (encoder.encode(each)[0] for each in (text, same, other))
        return float(x @ near - x @ far)

    return {
        language: float(np.mean([margin(*each) for each in triples]))
        for language, triples in TRIPLES.items()
    }


def _judge(by_language: dict[str, Parity], parity: Parity, precision: Precision) -> None:
    # A NaN is refused too.
    if parity.mean >= LEAST_MEAN and parity.min >= LEAST_WORST:
        return
    found = ", ".join(f"{name} {each.mean:.4f}" for name, each in by_language.items())
    mend = (
        "try --fp32: this model does not bear 8 bits"
        if precision == "int8"
        else "even in 32 bits the graph is not the model: choose another one"
    )
    raise ParityError(
        f"refused: cosine to the original {parity.mean:.4f} on average (at least {LEAST_MEAN} is wanted), "
        f"{parity.min:.4f} at worst (at least {LEAST_WORST}); {found}; {mend}"
    )


def _publish(folder: Path, out: Path) -> int:
    """Move into place for good; the size in bytes. An empty folder there is replaced."""
    size = 0
    for name in (ONNX, TOKENIZER, MANIFEST):
        path = folder / name
        size += path.stat().st_size
        with path.open("rb") as file:
            os.fsync(file.fileno())
    folder.replace(out)
    return size
