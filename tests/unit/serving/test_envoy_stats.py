"""Envoy's admin text -> one reading."""

from __future__ import annotations

import pytest

from extproc.core.ledger import Reading
from extproc.serving import envoy_stats

DUMP = '{"configs": [{"@type": "x", "last_updated": "2026-01-02T03:04:05.678Z"}]}'


def test_counters_are_read_and_those_not_there_yet_are_0() -> None:
    text = "http.ingress.downstream_rq_active: 1\nhttp.ingress.downstream_rq_total: 9\n"
    stats = envoy_stats._parse(text, DUMP)
    assert stats.reading == Reading("2026-01-02T03:04:05.678Z", 9, 1, 0, 0)
    assert stats.reading.ended == 8
    assert stats.streams_started == 0


@pytest.mark.parametrize(("text", "dump"), [("nonsense", DUMP), ("", '{"configs": []}'), ("", "")])
def test_what_is_not_envoys_is_refused(text: str, dump: str) -> None:
    with pytest.raises((ValueError, LookupError)):
        envoy_stats._parse(text, dump)
