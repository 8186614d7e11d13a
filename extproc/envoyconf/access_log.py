"""Envoy's own access log: one JSON line a request; which fields there are, and nothing of the client's
that is not bounded. Escaping is the formatter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog, AccessLogFilter
from envoy_data_plane.envoy.config.core.v3 import SubstitutionFormatString
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog
from envoy_data_plane.google.protobuf import Struct

from extproc.config import ACCESS_OFF, ACCESS_STDOUT, Config
from extproc.core import wire_names
from extproc.envoyconf import parts


@dataclass(frozen=True, slots=True)
class Field:
    """One key of the line: an Envoy format string, and what it says."""

    value: str
    meaning: str


FIELDS: Final[Mapping[str, Field]] = {
    "time": Field("%START_TIME(%Y-%m-%dT%H:%M:%S.%3fZ)%", "when the request began, UTC"),
    "id": Field(
        "%REQ(x-request-id):64%", "`x-request-id`, the client's own if it sent one; 64 characters"
    ),
    "trace": Field("%TRACE_ID%", "the trace's id, with tracing on"),
    "method": Field("%REQ(:method):16%", "16 characters"),
    "path": Field("%PATH(NQ:PATH):256%", "without its query; 256 characters"),
    "protocol": Field("%PROTOCOL%", "of the client's connection"),
    "client": Field(
        f"%REQ({wire_names.CLIENT})%",
        "whose key was sent, with `[server.auth]`; its id, never the key",
    ),
    "status": Field("%RESPONSE_CODE%", "as sent to the client; 0: nothing was"),
    "route": Field(f"%REQ({wire_names.ROUTE})%", "where the request was sent"),
    "reason": Field(f"%REQ({wire_names.REASON})%", "how the route was chosen"),
    "stream": Field(f"%REQ({wire_names.STREAM})%", "whether the client asked for a stream"),
    "upstream": Field(f"%RESP({wire_names.UPSTREAM})%", "who answered"),
    "model": Field(f"%RESP({wire_names.MODEL})%", "with which model"),
    "attempts": Field(
        f"%REQ({wire_names.ATTEMPTS})%",
        "each upstream tried and what came of it; an open end means the client did not wait",
    ),
    "fallback": Field(f"%REQ({wire_names.FALLBACK})%", "the first reason for going further"),
    "flags": Field("%RESPONSE_FLAGS%", "Envoy's response flags: who broke off, and how"),
    "details": Field(
        "%RESPONSE_CODE_DETAILS%", "where the status came from; of a refusal, its code"
    ),
    "bytes_in": Field("%BYTES_RECEIVED%", "of the request's body"),
    "bytes_out": Field("%BYTES_SENT%", "of the response's body"),
    "body_ms": Field("%REQUEST_DURATION%", "until the request's body had arrived"),
    "headers_ms": Field("%COMMON_DURATION(DS_RX_BEG:DS_TX_BEG:ms)%", "until the response began"),
    "duration_ms": Field("%DURATION%", "until the response ended"),
}

_OURS: Final = ("client", "route", "reason", "stream", "attempts", "fallback")
"""Read from request headers that a client can spell, too, where Envoy refuses before it strips them."""


def loggers(config: Config) -> list[AccessLog]:
    """None; or one for requests that our filters saw, and one for those that Envoy refused before."""
    if config.log.access == ACCESS_OFF:
        return []
    refused = {name: field for name, field in FIELDS.items() if name not in _OURS}
    return [
        _logger(config.log.access, FIELDS, parts.admitted()),
        _logger(config.log.access, refused, parts.admitted(invert=True)),
    ]


def _logger(target: str, fields: Mapping[str, Field], when: AccessLogFilter) -> AccessLog:
    line = SubstitutionFormatString(
        json_format=Struct.from_dict({name: field.value for name, field in fields.items()}),
    )
    logger = (
        StdoutAccessLog(log_format=line)
        if target == ACCESS_STDOUT
        else FileAccessLog(path=target, log_format=line)
    )
    return AccessLog(name="access", filter=when, typed_config=parts.pack(logger))
