"""The account over restarts: what one run knew, the next finds in the file, and the metrics say it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.core.ledger import Reading
from extproc.metrics import Metrics
from extproc.serving import reconcile
from extproc.serving.envoy_stats import EnvoyStats, EnvoyUnreadableError
from extproc.serving.reconcile import Reconciler

SERVED = RequestRecord(200, frozenset(), route="chat", reason="default")
BYPASSED = RequestRecord(200, frozenset(), route="chat", reason="degraded_bypassed")
ATTEMPT = AttemptRecord("a", 200, frozenset())


class Run:
    """One life of the sidecar beside an Envoy whose counters the test sets."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry, fallback_metric="f", routes=["chat"], upstream_names=["a"])
        self.told: list[EnvoyStats | None] = []
        self.reconciler = Reconciler(
            path=str(path), admin_url="", metrics=metrics, on_read=self.told.append
        )
        self.envoy: Reading | None = None
        monkeypatch.setattr(reconcile, "read_envoy", self._read_envoy)
        monkeypatch.setattr(self.reconciler, "_run", self._idle)

    async def _read_envoy(self, _session: Any, _url: str) -> EnvoyStats:
        if self.envoy is None:
            raise EnvoyUnreadableError("no counters")
        return EnvoyStats(self.envoy, 0, 0, 0, 0)

    async def _idle(self) -> None:
        pass

    async def read(self, envoy: Reading | None) -> bool:
        self.envoy = envoy
        return await self.reconciler._read(None, complain=True)  # type: ignore[arg-type]

    def receive(self, *records: RequestRecord | AttemptRecord) -> None:
        for record in records:
            self.reconciler.record(record)
        self.reconciler.batch_ended()

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"pointsman_{name}", labels)


def reading(started: int, let_through: int = 0, epoch: str = "e1") -> Reading:
    return Reading(epoch, started, 0, let_through, started)


def test_successor_of_a_killed_run_finds_only_what_nobody_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deep" / "x.ledger"

    async def lives() -> None:
        first = Run(path, monkeypatch)
        first.reconciler.start()
        await first.read(reading(0))
        first.receive(*[SERVED] * 5, BYPASSED)
        await first.read(reading(6, 1))
        assert first.count("requests_unseen_total", cause="record_lost") == 0
        # Killed: no aclose. While nobody is there, 4 more end, 3 of them bypassed.
        second = Run(path, monkeypatch)
        second.reconciler.start()
        await second.read(reading(10, 4))
        second.receive(SERVED)
        await second.read(reading(11, 4))
        assert second.count("requests_unseen_total", cause="bypassed") == 3
        await second.read(reading(11, 4))
        assert second.count("requests_unseen_total", cause="record_lost") == 1
        assert second.count("account_offset", of="requests") == 6
        assert second.count("account_offset", of="bypassed") == 1
        await second.reconciler.aclose()
        third = Run(path, monkeypatch)
        third.reconciler.start()
        await third.read(reading(11, 4))
        await third.read(reading(11, 4))
        assert third.count("requests_unseen_total", cause="bypassed") == 0
        assert third.count("account_offset", of="requests") == 11
        await third.reconciler.aclose()

    with caplog.at_level(logging.WARNING):
        asyncio.run(lives())
    assert "3 bypassed the sidecar" in caplog.text


def test_file_of_something_else_or_of_another_envoy_is_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ledger"
    path.write_bytes(b"something else" * 100)

    async def life() -> None:
        run = Run(path, monkeypatch)
        run.reconciler.start()
        await run.read(reading(0))
        run.receive(SERVED, ATTEMPT)
        await run.reconciler.aclose()
        other = Run(path, monkeypatch)
        other.reconciler.start()
        await other.read(reading(0, epoch="e2"))
        assert other.count("account_offset", of="requests") == 0
        await other.reconciler.aclose()

    asyncio.run(life())


def test_envoy_that_does_not_answer_is_counted_and_nothing_is_concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def life() -> None:
        run = Run(tmp_path / "x", monkeypatch)
        run.reconciler.start()
        assert await run.read(reading(5))
        assert not await run.read(None)
        assert await run.read(reading(5))
        assert run.count("requests_unseen_total", cause="record_lost") == 0
        assert run.count("envoy_reads_total", result="failed") == 1
        assert [stats is None for stats in run.told] == [False, True, False]
        await run.reconciler.aclose()

    asyncio.run(life())


def test_without_room_for_its_file_it_counts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk used to end the sidecar by SIGBUS, at its first record and after each restart."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def life() -> None:
        run = Run(tmp_path / "x.ledger", monkeypatch)
        run.reconciler.start()
        await run.read(reading(0))
        run.receive(SERVED)
        await run.read(reading(2))
        await run.read(reading(2))
        assert run.count("requests_unseen_total", cause="record_lost") == 1
        await run.reconciler.aclose()

    monkeypatch.setattr(os, "posix_fallocate", full)
    asyncio.run(life())
    assert "x.ledger: No space left on device" in caplog.text
