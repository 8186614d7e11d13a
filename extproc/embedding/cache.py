"""Files that are built once and kept: lock, scratch, atomic rename, seal, and the end of older versions;
it knows no model.

A file's name is KIND-SOURCE-vN.SUFFIX: what it is, twelve digits of what it was made from, and the
version of its maker, which only grows.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

_SEAL_SUFFIX: Final = ".json"
_LOCK_SUFFIX: Final = ".lock"
_NAME: Final = re.compile(r"([a-z0-9-]+)-[0-9a-f]{12}((?:-[a-z0-9]+)?)-v([0-9]{1,6})(\.[a-z]+)")

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
    with path.with_suffix(_LOCK_SUFFIX).open("wb") as file:
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


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Meanwhile `remove_older` of a newer version leaves it, for who opens it by name again."""
    with path.open("rb") as file:
        with contextlib.suppress(OSError):  # not every file system can lock
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def remove_older(path: Path, progress: Progress) -> None:
    """Remove what lower versions than `path` left beside it, but for what is in use or being built."""
    newest = _NAME.fullmatch(path.name)
    assert newest is not None
    gone_bytes = []
    with contextlib.suppress(OSError):  # an image's folder is read-only
        for old in sorted(path.parent.iterdir()):
            found = _NAME.fullmatch(old.name)
            if (
                found is not None
                and found.group(1, 2, 4) == newest.group(1, 2, 4)
                and int(found[3]) < int(newest[3])
                and (size_bytes := _remove(old)) is not None
            ):
                gone_bytes.append(size_bytes)
    if gone_bytes:
        what = f"{len(gone_bytes)} file{'s' if len(gone_bytes) > 1 else ''}"
        freed = f"{sum(gone_bytes) / 1e6:.0f} MB"
        progress(f"removed {what} that an older version had built in {path.parent} ({freed})")


def _remove(path: Path) -> int | None:
    """Its size in bytes; None: somebody has it."""
    with path.open("rb") as file, path.with_suffix(_LOCK_SUFFIX).open("ab") as lock:
        try:
            for each in (file, lock):
                fcntl.flock(each, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        size_bytes = os.fstat(file.fileno()).st_size
        for suffix in (_SEAL_SUFFIX, path.suffix, _LOCK_SUFFIX):
            path.with_suffix(suffix).unlink(missing_ok=True)
    return size_bytes


def _publish(source: Path, target: Path) -> None:
    """Move into place at once and for good: a reader sees the old file or all of the new one."""
    descriptor = os.open(source, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    source.replace(target)
