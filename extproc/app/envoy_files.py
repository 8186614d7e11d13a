"""Writes what Envoy reads, and keeps the keys in it current; what is in it, envoyconf says.

Each file is replaced as a whole, for Envoy watches for that, and is its owner's alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from extproc import envoyconf
from extproc.config import Config, Unfit, Upstream, client_keys, upstream_key
from extproc.envoyconf import files

LOOK_EVERY_S: Final = 1.0
BOOTSTRAP: Final = "envoy.yaml"

_log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


def install(config: Config) -> Path:
    """Write the bootstrap, and what it refers to, into the folder of the socket; the bootstrap's path.

    Raise Unfit or OSError, though not for files that `load` has just found fit.
    """
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.files(config).items():
        replace(folder / name, text)
    for each in key_files(config):
        replace(each.target, each.read().text)
    replace(folder / BOOTSTRAP, envoyconf.render(config))
    return folder / BOOTSTRAP


@dataclass(frozen=True, slots=True)
class Keys:
    """What a key file says: `text` for Envoy, which holds the keys, and `told`, which holds none."""

    text: str
    told: str


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A file with keys that others write, and the one in which Envoy gets them."""

    source: str
    target: Path
    read: Callable[[], Keys]
    """Raises Unfit or OSError."""
    is_clients: bool


def key_files(config: Config) -> list[KeyFile]:
    folder = Path(config.run_dir)
    found = []
    if (auth := config.server.auth) is not None:
        source = auth.keys_file
        read = partial(_clients_keys, source)
        found.append(KeyFile(source, folder / files.CLIENT_KEYS, read, is_clients=True))
    for upstream in config.upstreams.values():
        if (path := upstream.api_key_file) is not None:
            target = folder / files.upstream_key_file(upstream)
            found.append(
                KeyFile(path, target, partial(_upstreams_key, upstream, path), is_clients=False)
            )
    return found


def _clients_keys(source: str) -> Keys:
    keys = client_keys(source)
    clients = len({each.client for each in keys})
    return Keys(files.client_keys(keys), f"{len(keys)} keys of {clients} clients in force")


def _upstreams_key(upstream: Upstream, source: str) -> Keys:
    text = files.upstream_key(upstream, upstream_key(source))
    return Keys(text, f"the key of upstream {upstream.id} in force")


def replace(path: Path, text: str) -> None:
    """Never half a file, and never a moment in which others can read it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class KeyKeeper:
    """Publishes keys again when their file has changed.

    Mutable state: the stamps of the file that was last looked at and last taken, and whether that had a
    fault. A file with faults changes nothing: the keys that Envoy has stay good, and so they do while
    the sidecar is dead.
    """

    def __init__(self, file: KeyFile, told: Callable[[bool], None] = lambda _: None) -> None:
        """`told`: of each changed file, whether it was fit; a fault mended by going back is told, too."""
        self._source = file.source
        self._target = file.target
        self._read = file.read
        self._told = told
        self._seen: _Stamp | None = None
        self._taken: _Stamp | None = None
        self._faulty = False

    async def run(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # noqa: BLE001  the task's boundary: the keys from before stay in force
                _log.exception("%s: not looked at", self._source)
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Take a change that has stood for two looks, so that no half of a file is taken."""
        stamp = self._stamp()
        settled, self._seen = stamp == self._seen, stamp
        if not settled or stamp == self._taken:
            return
        self._taken = stamp
        try:
            keys = self._read()
            if not self._target.exists() or self._target.read_text(encoding="utf-8") != keys.text:
                replace(self._target, keys.text)
            elif not self._faulty:
                return
        except Unfit as unfit:
            others = len(unfit.each) - 1
            more = f", and {others} more: run pointsman check" if others else ""
            self._refused(f"{unfit.problem}; {unfit.mend}{more}")
        except OSError as error:
            self._refused(f"cannot be read: {error.strerror}")
        else:
            self._faulty = False
            _log.info("%s: %s", self._source, keys.told)
            self._told(True)

    def _refused(self, why: str) -> None:
        self._faulty = True
        _log.error("%s: %s (the keys from before stay in force)", self._source, why)
        self._told(False)

    def _stamp(self) -> _Stamp:
        try:
            found = Path(self._source).stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_ino, found.st_size)
