"""What `tail` shows of an event, and which it shows at all."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.app.tail import COLOURS, Filter, line
from extproc.core.accounts import RequestRecord
from extproc.core.errors import Outcome
from extproc.serving.events import describe


def event(**more: Any) -> dict[str, object]:
    values: dict[str, Any] = {
        "route": "code",
        "reason": "semantic",
        "upstream": "vllm-b",
        "attempts": "vllm-a:timeout,vllm-b:200",
        "fallback": "timeout",
        "request_id": "id-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "duration_s": 0.1234,
        "ended_s": 0.0,
    }
    return describe(RequestRecord(200, frozenset({"x"}), **{**values, **more}))


def test_line_tells_the_story() -> None:
    text = line(event(), colour=False)
    for part in ("200 served_by_fallback", "123 ms", "code (semantic)", "vllm-a:timeout", "id-1"):
        assert part in text
    assert "\x1b" not in text
    assert "timeout" not in line(event(fallback=""), colour=False)


def test_each_outcome_has_a_colour_of_its_own() -> None:
    assert COLOURS.keys() == set(Outcome)
    assert len(set(COLOURS.values())) == len(Outcome)
    assert COLOURS[Outcome.SERVED_BY_FALLBACK] in line(event(), colour=True)


def test_clients_control_characters_do_not_reach_the_terminal() -> None:
    text = line(event(request_id="a\x1b[31mb", path="/\x07\u202e"), colour=False)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        (Filter(), True),
        (Filter(outcomes=("failed", "served_by_fallback")), True),
        (Filter(outcomes=("failed",)), False),
        (Filter(routes=("code",), reasons=("keyword",)), False),
        (Filter(upstreams=("vllm-b",), fallbacks=("timeout",)), True),
        (Filter(id="id-1"), True),
        (Filter(id="id-2"), False),
    ],
)
def test_filters_are_all_met(chosen: Filter, shown: bool) -> None:
    assert chosen.shows(event()) is shown
