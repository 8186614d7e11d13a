"""How the sidecar's log lines look, and how many of one kind there may be; it logs nothing itself.

A line never repeats what an exception says: it may quote a body. Type and place are enough to find it.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TextIO, TypeAlias

import msgspec

from extproc.config import Log, LogFormat

BURST: Final = 5
"""So many lines from one place in the code, then silence until the window has passed."""
WINDOW_S: Final = 10.0
_PLACES: Final = 256
_MAX_TEXT: Final = 2000

FIELDS: Final = {
    "time": "UTC, with milliseconds",
    "level": "`debug`, `info`, `warning`, `error`",
    "logger": "the part of the sidecar that speaks",
    "message": "what it says, at most 2000 characters",
    "request_id": "the request it is about, if it is about one",
    "exception": "type and place; never the exception's text, which may quote a body",
    "suppressed": "so many lines from the same place were left out before this one",
}

_ExcInfo: TypeAlias = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


def configure(log: Log, *, stream: TextIO | None = None) -> None:
    """Replace the root logger's handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if log.format is LogFormat.JSON else TextLines())
    handler.addFilter(Limit(time.monotonic))
    logging.basicConfig(level=log.level.upper(), handlers=[handler], force=True)


@dataclass(slots=True)
class _Window:
    began_s: float
    lines: int = 0
    suppressed: int = 0


class Limit(logging.Filter):
    """Mutable state: one window for each place in the code that logged lately, least recent first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._windows: OrderedDict[tuple[str, int], _Window] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        place = (record.pathname, record.lineno)
        window = self._windows.pop(place, None)
        suppressed = 0
        if window is None or now_s - window.began_s >= WINDOW_S:
            suppressed = window.suppressed if window else 0
            window = _Window(now_s)
        self._windows[place] = window
        if len(self._windows) > _PLACES:
            self._windows.popitem(last=False)
        window.lines += 1
        if window.lines > BURST:
            window.suppressed += 1
            return False
        record.suppressed = suppressed
        return True


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{record.levelname} {record.name}: {_message(record)}"
        if request_id := _request_id(record):
            line += f" [request {request_id}]"
        if suppressed := getattr(record, "suppressed", 0):
            line += f" ({suppressed} more like it before)"
        if record.exc_info:
            line += "\n" + _place(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.gmtime(record.created)
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        if suppressed := getattr(record, "suppressed", 0):
            line["suppressed"] = suppressed
        if record.exc_info:
            line["exception"] = _place(record.exc_info)
        return msgspec.json.encode(line).decode()


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage().encode("utf-8", "replace").decode()
    return text.replace("\n", "\\n")[:_MAX_TEXT]


def _request_id(record: logging.LogRecord) -> str:
    text = str(getattr(record, "request_id", ""))
    return "".join(character for character in text if character.isprintable())[:64]


def _place(info: _ExcInfo) -> str:
    kind, error, trace = info
    frames = "".join(traceback.format_tb(trace))
    name = getattr(kind, "__name__", "") or type(error).__name__
    return f"{frames}{name}"
