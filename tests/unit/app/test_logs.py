"""The sidecar's lines: parseable, bounded, and without what an exception may quote."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeClock

from extproc.app import logs
from extproc.config import Log, LogFormat, LogLevel


class Written:
    """A logger of its own, under one format and one clock."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.clock = FakeClock()
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(formatter)
        handler.addFilter(logs.Limit(self.clock))
        self.log = logging.Logger("extproc.part")  # noqa: LOG001  no tree: nothing else sees it
        self.log.addHandler(handler)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def written() -> Written:
    return Written(logs.JsonLines())


def test_line_has_its_fields_and_the_request_it_is_about(written: Written) -> None:
    written.log.warning("odd: %s", 'a"b\nc', extra={"request_id": "id-1"})
    (line,) = written.lines
    assert line.keys() <= logs.FIELDS.keys()
    assert (line["level"], line["logger"]) == ("warning", "extproc.part")
    assert line["message"] == 'odd: a"b\\nc'
    assert line["request_id"] == "id-1"
    assert line["time"].endswith("Z")


def test_request_id_is_a_clients_and_bounded(written: Written) -> None:
    written.log.error("x", extra={"request_id": "a\nb\x1b[31m" + "x" * 500})
    (line,) = written.lines
    assert line["request_id"] == ("ab[31m" + "x" * 500)[:64]


def test_exception_says_type_and_place_and_never_its_text(written: Written) -> None:
    try:
        raise ValueError("the prompt itself")  # noqa: TRY301
    except ValueError:
        written.log.exception("failed")
    (line,) = written.lines
    assert line["exception"].endswith("ValueError")
    assert "test_logs.py" in line["exception"]
    # The source line stands in the trace; what it was called with doesn't.
    assert written.stream.getvalue().count("the prompt itself") <= 1


def test_long_and_broken_text_is_bounded(written: Written) -> None:
    written.log.info("%s", "\ud800" + "x" * 10_000)
    (line,) = written.lines
    assert len(line["message"]) == 2000


def test_repeated_lines_are_limited_by_place_and_counted(written: Written) -> None:
    for number in range(100):
        written.log.info("again %d", number)
        written.clock.advance(0.01)
    written.log.info("another place")
    assert len(written.lines) == logs.BURST + 1
    written.clock.advance(logs.WINDOW_S)
    written.log.info("fresh")
    assert "suppressed" not in written.lines[-1]


def test_next_window_says_how_many_were_left_out(written: Written) -> None:
    def again() -> None:
        written.log.info("again")

    for _ in range(20):
        again()
    written.clock.advance(logs.WINDOW_S)
    again()
    assert written.lines[-1]["suppressed"] == 20 - logs.BURST


def test_places_remembered_are_bounded() -> None:
    limit = logs.Limit(FakeClock())
    for line in range(1000):
        limit.filter(logging.LogRecord("x", logging.INFO, "f.py", line, "m", None, None))
    assert len(limit._windows) <= 256


def test_text_lines_tell_the_same() -> None:
    written = Written(logs.TextLines())
    written.log.warning("odd", extra={"request_id": "id-1"})
    assert written.stream.getvalue() == "WARNING extproc.part: odd [request id-1]\n"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers, logger.level = handlers, level


@pytest.mark.parametrize("level", LogLevel)
def test_level_and_format_are_the_configurations(root: logging.Logger, level: LogLevel) -> None:
    stream = io.StringIO()
    kept = root.handlers[:]
    root.handlers = []
    try:
        logs.configure(Log(level=level, format=LogFormat.JSON), stream=stream)
        logging.getLogger("x").error("said")
    finally:
        root.handlers = kept
    assert logging.getLevelName(root.level).lower() == level
    assert json.loads(stream.getvalue())["message"] == "said"
