"""What a folder with an exported model says about itself, and whether that still holds; it loads no model.

    model.onnx  tokenizer.json  pointsman.json

The last is the manifest. It is written after the others and holds their digests, so a copy that broke off,
or one file of another export, is noticed at start and not in the decisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from extproc.embedding.cache import sha256_of

ONNX: Final = "model.onnx"
TOKENIZER: Final = "tokenizer.json"
MANIFEST: Final = "pointsman.json"
FORMAT: Final = 1
"""Raise it when an older Pointsman could not run what a newer one exports."""

AGAIN: Final = "export it again with pointsman export-model"

_TRAINED_TOKENS: Final = 8
"""Fewer than that no model takes; a manifest that says so is not ours."""


class ManifestError(Exception):
    """The folder is not what its manifest says; the text names the file and how to mend it."""


class Parity(msgspec.Struct, frozen=True):
    """Cosines between the exported model's vectors and the original's, over `texts` texts."""

    mean: float
    min: float
    texts: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown members are ignored: they tell a person more, and change nothing."""

    format: int
    source: str
    """The folder or hub name that it was exported from, as it was given."""
    made_by: str
    dimension: int
    max_tokens: int
    """That the original takes, marks included."""
    pooling: str
    precision: Literal["int8", "fp32"]
    parity: Parity
    files: Mapping[str, str]
    """Name to sha256 of each file beside the manifest."""

    @property
    def digest(self) -> str:
        """Of all that vectors depend on."""
        names = sorted(self.files)
        return hashlib.sha256("".join(self.files[name] for name in names).encode()).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Of the files that a manifest names. Raises OSError."""
    return {name: sha256_of(folder / name) for name in (ONNX, TOKENIZER)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that is whole. Raises ManifestError, or OSError: a file is missing."""
    path = folder / MANIFEST
    content = path.read_bytes()
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{path}: torn, or not ours ({error}); {AGAIN}") from error
    if manifest.format != FORMAT:
        raise ManifestError(
            f"{path}: its format is {manifest.format}, and this Pointsman reads {FORMAT}; "
            f"{AGAIN}, of the same version"
        )
    if manifest.max_tokens < _TRAINED_TOKENS or manifest.dimension < 1:
        raise ManifestError(f"{path}: not ours (max_tokens {manifest.max_tokens}); {AGAIN}")
    if manifest.files.keys() != {ONNX, TOKENIZER}:
        raise ManifestError(f"{path}: not ours (files {sorted(manifest.files)}); {AGAIN}")
    for name, digest in digests(folder).items():
        if digest != manifest.files[name]:
            raise ManifestError(
                f"{folder / name}: not the file that {MANIFEST} was written for (sha256 {digest[:12]}, "
                f"it says {manifest.files[name][:12]}); copy the whole folder again, or {AGAIN}"
            )
    return manifest
