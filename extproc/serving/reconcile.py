"""Reads Envoy's counters now and then, and counts the requests that no record ever told of.

What is accounted for survives a killed sidecar in a small mapped file beside the socket: without it,
a new run could not tell what its predecessor had counted from what nobody saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp

from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.core.errors import RouteReason
from extproc.core.ledger import Ledger, Tally
from extproc.metrics import Metrics
from extproc.serving.envoy_stats import EnvoyStats, EnvoyUnreadableError, read_envoy

INTERVAL_S: Final = 2.0
"""Between two readings; far more than the tens of milliseconds that a record travels."""
_FIRST_TRY_S: Final = 0.25
_FIRST_TRIES: Final = 60
_STALL_S: Final = 0.5
"""A loop that woke so much too late may not have read the records that were due."""

_LAYOUT: Final = struct.Struct("<8s48s3q")
_MAGIC: Final = b"PMLEDG01"

_log = logging.getLogger(__name__)


class Reconciler:
    """Mutable state: the ledger, its mapped file, and the task that reads Envoy."""

    def __init__(
        self,
        *,
        path: str,
        admin_url: str,
        metrics: Metrics,
        on_read: Callable[[EnvoyStats | None], None] = lambda _: None,
    ) -> None:
        """`on_read` is told of each reading once our side has taken it in; None: Envoy was silent."""
        self._on_read = on_read
        self._path = Path(path)
        self._admin_url = admin_url
        self._metrics = metrics
        self._ledger = Ledger()
        self._file: mmap.mmap | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on without the file where it cannot be had: requests matter more than the next run's account."""
        try:
            self._file = self._mapped()
        except OSError as error:
            _log.warning(
                "%s: %s; a restart of the sidecar will not know what this run has accounted for",
                self._path,
                error.strerror,
            )
        else:
            magic, epoch, *tally = _LAYOUT.unpack_from(self._file)
            if magic == _MAGIC:
                self._ledger = Ledger(
                    stored_epoch=epoch.rstrip(b"\0").decode(errors="replace"), stored=Tally(*tally)
                )
        self._task = asyncio.create_task(self._run())

    def _mapped(self) -> mmap.mmap:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        with self._path.open("r+b") as file:
            file.truncate(_LAYOUT.size)
            # A hole that the disk has no room to fill would end us by SIGBUS at the first record.
            os.posix_fallocate(file.fileno(), 0, _LAYOUT.size)
            return mmap.mmap(file.fileno(), _LAYOUT.size)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._file is not None:
            self._save()
            self._file.close()
            self._file = None

    def record(self, record: RequestRecord | AttemptRecord) -> None:
        if isinstance(record, RequestRecord):
            bypassed = record.reason == RouteReason.DEGRADED_BYPASSED
            self._ledger.record(is_request=True, let_through=bypassed)
        else:
            self._ledger.record(is_request=False, let_through=False)

    def batch_ended(self) -> None:
        self._save()

    def log_streams(self, count: int) -> None:
        if count == 0:
            self._ledger.fell_silent()

    def passed_on(self) -> None:
        """The sidecar answered `unchanged`, because of a fault of its own."""
        self._ledger.passed_on()

    def _save(self) -> None:
        # Before the first reading nobody knows which Envoy the records are of.
        if self._file is not None and self._ledger.epoch:
            tally = self._ledger.accounted
            _LAYOUT.pack_into(
                self._file,
                0,
                _MAGIC,
                self._ledger.epoch.encode(),
                tally.requests,
                tally.let_through,
                tally.records,
            )

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        first_tries = _FIRST_TRIES
        async with aiohttp.ClientSession() as session:
            while True:
                # Envoy usually starts after us, which is nothing to complain of.
                reached = await self._read(session, complain=first_tries == 0)
                first_tries = 0 if reached else max(first_tries - 1, 0)
                wait_s = _FIRST_TRY_S if first_tries else INTERVAL_S
                due = loop.time() + wait_s
                await asyncio.sleep(wait_s)
                if loop.time() - due > _STALL_S:
                    self._ledger.forget_reading()

    async def _read(self, session: aiohttp.ClientSession, *, complain: bool) -> bool:
        try:
            stats = await read_envoy(session, self._admin_url)
        except EnvoyUnreadableError as error:
            self._metrics.envoy_read(ok=False)
            self._ledger.forget_reading()
            self._on_read(None)
            if complain:
                _log.warning("%s", error)
            return False
        self._metrics.envoy_read(ok=True)
        found = self._ledger.read(stats.reading)
        self._metrics.requests_unseen(found)
        self._metrics.account_offset(self._ledger.offset)
        self._save()
        self._on_read(stats)
        if found.bypassed or found.record_lost:
            _log.warning(
                "Envoy ended %d request(s) that no record told of: %d bypassed the sidecar, "
                "%d lost their record",
                found.bypassed + found.record_lost,
                found.bypassed,
                found.record_lost,
            )
        return True
