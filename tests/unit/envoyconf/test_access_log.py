"""What the access log and the spans may hold: ours, or a client's and bounded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from extproc.config import Config, Log, Tracing, parse
from extproc.core import wire_names
from extproc.envoyconf import render
from extproc.envoyconf.access_log import FIELDS, loggers
from extproc.envoyconf.tracing import ATTEMPT_TAGS, REQUEST_TAGS

FORMATS = [
    *(field.value for field in FIELDS.values()),
    *REQUEST_TAGS.values(),
    *ATTEMPT_TAGS.values(),
]


@pytest.fixture
def config() -> Config:
    text = '[upstream.a]\nbase_url = "http://h"\nmodel = "m"\n'
    return parse(text, file="x", environ=None)


def test_both_are_off_by_default(config: Config) -> None:
    assert loggers(config) == []
    bootstrap = render(config)
    for word in ("FileAccessLog", "StdoutAccessLog", "opentelemetry", "otlp"):
        assert word not in bootstrap


def test_off_is_what_it_was_before_there_was_any(config: Config) -> None:
    on = render(replace(config, log=Log(access="stdout"), tracing=Tracing("http://127.0.0.1:4317")))
    assert "StdoutAccessLog" in on
    assert "OpenTelemetryConfig" in on
    assert render(replace(config, log=Log(), tracing=Tracing())) == render(config)


@pytest.mark.parametrize("text", FORMATS)
def test_only_our_headers_and_bounded_ones_of_the_client_are_read(text: str) -> None:
    for name, bound in re.findall(r"%(?:REQ|RESP)\(([^)]+)\)(:\d+)?%", text):
        assert name.startswith(wire_names.PREFIX) or bound, text
        assert name in ("x-request-id", ":method") or name.startswith(wire_names.PREFIX)
    for query, bound in re.findall(r"%PATH\((\w+):PATH\)(:\d+)?%", text):
        assert query == "NQ"
        assert bound
