"""Envoy's admin text -> one reading."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from extproc.core.ledger import Reading
from extproc.serving import envoy_stats
from extproc.serving.envoy_stats import EnvoyUnreadableError, read_envoy

DUMP = '{"configs": [{"@type": "x", "last_updated": "2026-01-02T03:04:05.678Z"}]}'


def test_counters_are_read_and_those_not_there_yet_are_0() -> None:
    text = "http.ingress.downstream_rq_active: 1\nhttp.ingress.downstream_rq_total: 9\n"
    stats = envoy_stats._parse(text, DUMP)
    assert stats.reading == Reading("2026-01-02T03:04:05.678Z", 9, 1, 0, 0)
    assert stats.reading.ended == 8
    assert stats.streams_started == 0


@pytest.mark.parametrize(
    ("text", "dump"),
    [("nonsense", DUMP), ("", '{"configs": []}'), ("", ""), ("", "[]"), ("", "null")],
)
def test_what_is_not_envoys_is_refused(
    text: str, dump: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(_session: Any, url: str, _params: dict[str, str]) -> str:
        return text if url.endswith("/stats") else dump

    monkeypatch.setattr(envoy_stats, "_get", get)
    with pytest.raises(EnvoyUnreadableError):
        asyncio.run(read_envoy(None, "http://envoy"))  # type: ignore[arg-type]
