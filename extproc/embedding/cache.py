"""Files that are built once and kept: lock, scratch, atomic rename, seal; it knows no model."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

_SEAL_SUFFIX: Final = ".json"

Progress = Callable[[str], None]


class _Seal(msgspec.Struct, frozen=True):
    """What was true of a cached file when it was accepted; written last, so its presence commits."""

    size_bytes: int
    sha256: str


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def intact_digest(path: Path) -> str | None:
    """The digest of a cached file that is what it was when accepted; None: absent or damaged.

    Reading all of it costs 40 ms and warms the page cache for those who map it.
    """
    try:
        seal = msgspec.json.decode(path.with_suffix(_SEAL_SUFFIX).read_bytes(), type=_Seal)
        if path.stat().st_size == seal.size_bytes and sha256_of(path) == seal.sha256:
            return seal.sha256
    except (OSError, msgspec.MsgspecError):
        pass
    return None


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """One builder of `path` at a time; the kernel frees the lock of one that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another start is building the model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_into(path: Path, build: Callable[[Path], None]) -> str:
    """Have `build` write a scratch file and put it in its place, sealed; the digest. Hold the lock."""
    for orphan in path.parent.glob(f".{path.name}.*"):  # of a builder that was killed
        shutil.rmtree(orphan, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        build(built)
        digest = sha256_of(built)
        seal = Path(scratch) / "seal"
        seal.write_bytes(msgspec.json.encode(_Seal(built.stat().st_size, digest)))
        _publish(built, path)
        _publish(seal, path.with_suffix(_SEAL_SUFFIX))
    return digest


def _publish(source: Path, target: Path) -> None:
    """Move into place at once and for good: a reader sees the old file or all of the new one."""
    descriptor = os.open(source, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    source.replace(target)
