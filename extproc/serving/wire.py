"""Protobuf on the wire <-> plain values; the only importer of generated protos.

One HTTP request is one ext_proc stream of at most two messages (headers, then the whole body), and
each message gets exactly one reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc
from google.protobuf.message import DecodeError

from extproc.core import wire_names
from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.core.exchange import Event, Mutation, RequestBody, RequestHeaders, Respond
from extproc.core.foreign import Answer, Reply

ProcessingRequest = ext_proc.ProcessingRequest
ProcessingResponse = ext_proc.ProcessingResponse
AccessLogMessage = als_pb2.StreamAccessLogsMessage
AccessLogResponse = als_pb2.StreamAccessLogsResponse
ExternalProcessorServicer = ext_proc_grpc.ExternalProcessorServicer
AccessLogServiceServicer = als_pb2_grpc.AccessLogServiceServicer

_OVERWRITE: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_PERIODIC: Final = accesslog_pb2.AccessLogType.DownstreamPeriodic
_METHODS: Final = {
    0: "",
    **{number: name for name, number in base_pb2.RequestMethod.items() if number},
}
_MAX_TOKENS: Final = 100_000_000
_DETAILS: Final = "response.code_details"
_STREAM_ID: Final = (2, 1, 1, 26)  # http_logs, log_entry, common_properties, stream_id
_TO_ASCII: Final = bytes(range(128)) + b"?" * 128
_DELIMITED: Final = 2
_FIXED: Final = {1: 8, 5: 4}  # wire type -> bytes
_BODY_MODES: Final = processing_mode_pb2.ProcessingMode.BodySendMode
_LOGS: Final = "envoy.service.accesslog.v3.AccessLogService"

# grpc.health.v1, spelt out: one message with one number, for ever, and no package for it.
_HEALTH: Final = "grpc.health.v1.Health"
_SERVING: Final = b"\x08\x01"
_NOT_SERVING: Final = b"\x08\x02"


def add_servicers(server: grpc.aio.Server, *, processor: Any, access_log: Any) -> None:
    add_processor(server, processor)
    stream_logs = grpc.stream_unary_rpc_method_handler(
        access_log.StreamAccessLogs,
        request_deserializer=decode_log,
        response_serializer=AccessLogResponse.SerializeToString,
    )
    handlers = {"StreamAccessLogs": stream_logs}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_LOGS, handlers),))


def decode_log(raw: bytes) -> Any:
    """A message of the access log, whatever clients have sent.

    Envoy copies `x-request-id` as it came into `stream_id`, and a protobuf string holds UTF-8 alone.
    Refusing the message would end the log's stream, and with it the records of other requests.
    """
    try:
        return AccessLogMessage.FromString(raw)
    except DecodeError:
        mended = bytearray(raw)
        for start, end in _found(raw, 0, len(raw), _STREAM_ID):
            mended[start:end] = raw[start:end].translate(_TO_ASCII)
        return AccessLogMessage.FromString(bytes(mended))


def _found(raw: bytes, at: int, end: int, path: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where the values of a nested field stand (https://protobuf.dev/programming-guides/encoding)."""
    while at < end:
        key, at = _varint(raw, at)
        size = _FIXED.get(key & 7)
        if size is None:
            size, after = _varint(raw, at)
            at, size = (after, size) if key & 7 == _DELIMITED else (after, 0)
        if key >> 3 == path[0] and key & 7 == _DELIMITED:
            if path[1:]:
                yield from _found(raw, at, at + size, path[1:])
            else:
                yield at, at + size
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number, and where the next one begins."""
    value = shift = 0
    while raw[at] & 0x80:
        value |= (raw[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | raw[at] << shift, at + 1


def add_processor(server: grpc.aio.Server, processor: Any) -> None:
    ext_proc_grpc.add_ExternalProcessorServicer_to_server(processor, server)


def add_health(server: grpc.aio.Server, is_serving: Callable[[], bool]) -> None:
    """The standard health service, `Check` alone: what Envoy and kubelets ask."""

    async def check(_request: bytes, _context: Any) -> bytes:
        return _SERVING if is_serving() else _NOT_SERVING

    handlers = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_HEALTH, handlers),))


def decode(message: Any, named: frozenset[str] = frozenset()) -> Event | None:
    """The event in a ProcessingRequest; None for a phase we did not ask for.

    `named`: the headers that rules ask for, in lower case. Of one that comes twice the last counts:
    what the proxy nearest to us has added.
    """
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        wanted = wire_names.READ | named
        found = {
            header.key: header.raw_value.decode("latin-1") or header.value
            for header in message.request_headers.headers.headers
            if header.key in wanted
        }
        return RequestHeaders(
            method=found.get(":method", ""),
            path=found.get(":path", ""),
            content_type=found.get("content-type", ""),
            content_encoding=found.get("content-encoding", "").strip().lower(),
            end_of_stream=message.request_headers.end_of_stream,
            named=tuple((name, found[name]) for name in named if name in found) if named else (),
        )
    if kind == "request_body":
        return RequestBody(message.request_body.body)
    return None


def request_id(message: Any) -> str:
    """Of a message of headers; "" of any other. Searched for only when there is something to say."""
    if not message.HasField("request_headers"):
        return ""
    for header in message.request_headers.headers.headers:
        if header.key == "x-request-id":
            return str(header.raw_value.decode("latin-1") or header.value)
    return ""


def head(message: Any) -> tuple[str, str, str]:
    """Method, path and request id of a message of headers."""
    found = dict.fromkeys((":method", ":path", "x-request-id"), "")
    for header in message.request_headers.headers.headers:
        if header.key in found:
            found[header.key] = str(header.raw_value.decode("latin-1") or header.value)
    return found[":method"], found[":path"], found["x-request-id"]


def continue_headers() -> Any:
    return ProcessingResponse(request_headers=ext_proc.HeadersResponse())


# The reply to every message of headers that waits for its body: one immutable object.
CONTINUE: Final = continue_headers()


def encode_mutation(
    mutation: Mutation, *, in_headers_phase: bool, remove: Iterable[str] = ()
) -> Any:
    common = ext_proc.CommonResponse(
        header_mutation=_header_mutation(mutation.headers.items(), remove),
        clear_route_cache=True,
    )
    if mutation.body is not None:
        common.body_mutation.body = mutation.body
    if in_headers_phase:
        return ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=common))
    return ProcessingResponse(request_body=ext_proc.BodyResponse(response=common))


def encode_told(headers: Mapping[str, str], remove: Iterable[str] = ()) -> Any:
    """The reply to an answer's headers: these are added, those removed."""
    common = ext_proc.CommonResponse(header_mutation=_header_mutation(headers.items(), remove))
    return ProcessingResponse(response_headers=ext_proc.HeadersResponse(response=common))


def encode_respond(respond: Respond | Reply) -> Any:
    response = ext_proc.ImmediateResponse(
        headers=_header_mutation(respond.headers.items()),
        body=respond.body,
        details=respond.code or "answered_by_sidecar",
    )
    response.status.code = respond.status
    return ProcessingResponse(immediate_response=response)


def pass_unchanged(message: Any) -> Any:
    """The neutral reply to a phase that we did not ask for."""
    reply = ProcessingResponse()
    getattr(reply, message.WhichOneof("request")).SetInParent()
    return reply


def is_response_phase(message: Any) -> bool:
    """Whether a message comes from a tier's first-token watch."""
    return message.WhichOneof("request") in ("response_headers", "response_body")


def begins_stream(message: Any) -> bool:
    """Whether these response headers open an event stream, whose first chunk is worth waiting for."""
    if not message.HasField("response_headers") or message.response_headers.end_of_stream:
        return False
    return any(
        header.key == "content-type"
        and (header.raw_value or header.value.encode()).lower().startswith(b"text/event-stream")
        for header in message.response_headers.headers.headers
    )


def _header_mutation(headers: Iterable[tuple[str, str]], remove: Iterable[str] = ()) -> Any:
    return ext_proc.HeaderMutation(
        remove_headers=remove,
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
                append_action=_OVERWRITE,
            )
            for key, value in headers
        ],
    )


def spoofed(message: Any) -> tuple[str, ...]:
    """Names of the headers in our name that a message of headers brings."""
    part = getattr(message, message.WhichOneof("request"))
    return tuple(
        {each.key for each in part.headers.headers if each.key.startswith(wire_names.PREFIX)}
    )


def body_mode(message: Any) -> str:
    """How that Envoy sends request bodies; "" unless this is a stream's first message and tells."""
    if not message.HasField("protocol_config"):
        return ""
    return str(_BODY_MODES.Name(message.protocol_config.request_body_mode))


def decode_answer(message: Any) -> Answer:
    """Of the headers of a response."""
    status, is_stream = 0, False
    for header in message.response_headers.headers.headers:
        value = header.raw_value or header.value.encode()
        if header.key == ":status":
            status = int(value) if len(value) == 3 and value.isdigit() else 0
        elif header.key == "content-type":
            is_stream = value.lower().startswith(b"text/event-stream")
    details = ""
    for told in message.attributes.values():
        if _DETAILS in told.fields:
            details = str(told.fields[_DETAILS].string_value)
    return Answer(status, details, is_stream)


def log_name(message: Any) -> str | None:
    """The name of the log; Envoy sends it with the first message of a stream only."""
    return message.identifier.log_name if message.HasField("identifier") else None


def _kept(metadata: Any) -> dict[str, Any]:
    """What the tier kept for the account: field name -> protobuf Value."""
    kept = metadata.filter_metadata
    # Indexing a protobuf map would add the key.
    return dict(kept[wire_names.METADATA].fields) if wire_names.METADATA in kept else {}


def _kept_text(kept: dict[str, Any], key: str) -> str:
    return str(kept[key].string_value) if key in kept else ""


def _kept_count(kept: dict[str, Any], key: str) -> int | None:
    """A provider's number: None unless it is a sane count (NaN compares false, too)."""
    if key not in kept or kept[key].WhichOneof("kind") != "number_value":
        return None
    value = kept[key].number_value
    return int(value) if 0 <= value <= _MAX_TOKENS else None


def _taken(common: Any) -> float | None:
    """Until the last byte to the client, or to the end where there was none."""
    if common.HasField("duration"):
        return _seconds(common.duration)
    if common.HasField("time_to_last_downstream_tx_byte"):
        return _seconds(common.time_to_last_downstream_tx_byte)
    return None


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos * 1e-9)


def _micros(text: str) -> float | None:
    """Seconds; None for Envoy's `-`, which stands for a moment that never came."""
    return int(text) * 1e-6 if text.isascii() and text.isdecimal() else None


def decode_records(name: str, message: Any) -> Iterator[RequestRecord | AttemptRecord]:
    for entry in message.http_logs.log_entry:
        common, response = entry.common_properties, entry.response
        flags = frozenset(field.name for field, _ in common.response_flags.ListFields())
        status = response.response_code.value
        sent: Mapping[str, str] = entry.request.request_headers
        got = response.response_headers
        if name.startswith(wire_names.LOG_ATTEMPT_PREFIX):
            kept = _kept(common.metadata)
            yield AttemptRecord(
                upstream=name.removeprefix(wire_names.LOG_ATTEMPT_PREFIX),
                status=status,
                flags=flags,
                fail=got.get(wire_names.FAIL, ""),
                admission=_kept_text(kept, wire_names.KEPT_ADMISSION),
                time_to_headers_s=(
                    _seconds(common.time_to_first_upstream_rx_byte)
                    if common.HasField("time_to_first_upstream_rx_byte")
                    else None
                ),
                ended=common.access_log_type != _PERIODIC,
                route=_kept_text(kept, wire_names.KEPT_ROUTE),
                is_stream=got.get("content-type", "").startswith("text/event-stream"),
                time_to_first_chunk_s=_micros(
                    common.custom_tags.get(wire_names.FIRST_CHUNK_US, "")
                ),
                time_to_last_byte_s=(
                    _seconds(common.time_to_last_upstream_rx_byte)
                    if common.HasField("time_to_last_upstream_rx_byte")
                    else None
                ),
                prompt_tokens=_kept_count(kept, wire_names.PROMPT_TOKENS),
                completion_tokens=_kept_count(kept, wire_names.COMPLETION_TOKENS),
            )
        elif name == wire_names.LOG_REQUEST:
            if wire_names.ADMITTED not in _kept(common.metadata):
                sent = {}  # refused before what a client says in our name was taken off
            yield RequestRecord(
                status=status,
                flags=flags,
                route=sent.get(wire_names.ROUTE, ""),
                reason=sent.get(wire_names.REASON, ""),
                upstream=got.get(wire_names.UPSTREAM, ""),
                # A client that left got no response headers; the request's keep the story.
                attempts=got.get(wire_names.ATTEMPTS, "") or sent.get(wire_names.ATTEMPTS, ""),
                fallback=got.get(wire_names.FALLBACK, "") or sent.get(wire_names.FALLBACK, ""),
                skip=frozenset(filter(None, sent.get(wire_names.SKIP, "").split(","))),
                admission=sent.get(wire_names.ADMISSION, ""),
                request_id=entry.request.request_id,
                method=_METHODS[entry.request.request_method],
                path=entry.request.path,
                duration_s=(took_s := _taken(common)),
                ended_s=(
                    _seconds(common.start_time) + (took_s or 0.0)
                    if common.HasField("start_time")
                    else None
                ),
            )
