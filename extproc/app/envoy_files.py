"""Writes what Envoy reads, and keeps the clients' keys in it current; what is in it, envoyconf says.

Each file is replaced as a whole, for Envoy watches for that, and is its owner's alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from extproc.config import ClientKey, Config, Unfit, client_keys
from extproc.envoyconf import render
from extproc.envoyconf.files import CLIENT_KEYS, files
from extproc.envoyconf.files import client_keys as keys_document

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
    auth = config.server.auth
    keys: tuple[ClientKey, ...] = () if auth is None else client_keys(auth.keys_file)
    for name, text in files(config, keys).items():
        replace(folder / name, text)
    replace(folder / BOOTSTRAP, render(config))
    return folder / BOOTSTRAP


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
    """Publishes the clients' keys again when their file has changed.

    Mutable state: the stamps of the file that was last looked at and last taken, and whether that had a
    fault. A file with faults changes nothing: the keys that Envoy has stay good, and so they do while
    the sidecar is dead.
    """

    def __init__(self, keys_file: str, run_dir: str, told: Callable[[bool], None]) -> None:
        """`told`: of each changed file, whether it was fit; a fault mended by going back is told, too."""
        self._source = keys_file
        self._target = Path(run_dir) / CLIENT_KEYS
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
            keys = client_keys(self._source)
            text = keys_document(keys)
            is_new = not self._target.exists() or self._target.read_text(encoding="utf-8") != text
            if is_new:
                replace(self._target, text)
            elif not self._faulty:
                return
        except Unfit as unfit:
            self._refused(f"{unfit.problem}; {unfit.mend}")
        except OSError as error:
            self._refused(f"cannot be read: {error.strerror}")
        else:
            self._faulty = False
            clients = len({each.client for each in keys})
            _log.info("%s: %d keys of %d clients in force", self._source, len(keys), clients)
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
