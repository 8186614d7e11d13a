"""When the sidecar calls itself alive and ready; the listener itself is tried in tests/integration."""

from __future__ import annotations

import pytest
from fakes import FakeClock

from extproc.serving import admin


def test_loop_that_no_longer_beats_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(admin.time, "monotonic", clock)
    health = admin.Health()
    assert health.is_live
    assert not health.ready
    clock.advance(admin.STALE_BEAT_S)
    assert not health.is_live
    health.beat()
    assert health.is_live
