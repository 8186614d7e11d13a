"""Protobuf on the wire <-> plain values; the only importer of generated protos.

One HTTP request is one ext_proc stream of at most two messages (headers, then the whole body), and
each message gets exactly one reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc

from extproc.core import wire_names
from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.core.exchange import Event, Mutation, RequestBody, RequestHeaders, Respond

ProcessingRequest = ext_proc.ProcessingRequest
ProcessingResponse = ext_proc.ProcessingResponse
AccessLogMessage = als_pb2.StreamAccessLogsMessage
AccessLogResponse = als_pb2.StreamAccessLogsResponse
ExternalProcessorServicer = ext_proc_grpc.ExternalProcessorServicer
AccessLogServiceServicer = als_pb2_grpc.AccessLogServiceServicer

_OVERWRITE: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_PERIODIC: Final = accesslog_pb2.AccessLogType.DownstreamPeriodic
_WANTED: Final = frozenset({":method", ":path", "content-type", "content-encoding"})


def add_servicers(server: grpc.aio.Server, *, processor: Any, access_log: Any) -> None:
    ext_proc_grpc.add_ExternalProcessorServicer_to_server(processor, server)
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(access_log, server)


def decode(message: Any) -> Event | None:
    """The event in a ProcessingRequest; None for a phase we did not ask for."""
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        found = {
            header.key: header.raw_value.decode("latin-1") or header.value
            for header in message.request_headers.headers.headers
            if header.key in _WANTED
        }
        return RequestHeaders(
            method=found.get(":method", ""),
            path=found.get(":path", ""),
            content_type=found.get("content-type", ""),
            content_encoding=found.get("content-encoding", "").strip().lower(),
            end_of_stream=message.request_headers.end_of_stream,
        )
    if kind == "request_body":
        return RequestBody(message.request_body.body)
    return None


def continue_headers() -> Any:
    return ProcessingResponse(request_headers=ext_proc.HeadersResponse())


# The reply to every message of headers that waits for its body: one immutable object.
CONTINUE: Final = continue_headers()


def encode_mutation(mutation: Mutation, *, in_headers_phase: bool) -> Any:
    common = ext_proc.CommonResponse(
        header_mutation=_header_mutation(mutation.headers.items()),
        clear_route_cache=True,
    )
    if mutation.body is not None:
        common.body_mutation.body = mutation.body
    if in_headers_phase:
        return ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=common))
    return ProcessingResponse(request_body=ext_proc.BodyResponse(response=common))


def encode_respond(respond: Respond) -> Any:
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
        and (header.raw_value or header.value.encode()).startswith(b"text/event-stream")
        for header in message.response_headers.headers.headers
    )


def _header_mutation(headers: Iterable[tuple[str, str]]) -> Any:
    return ext_proc.HeaderMutation(
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
                append_action=_OVERWRITE,
            )
            for key, value in headers
        ]
    )


def log_name(message: Any) -> str | None:
    """The name of the log; Envoy sends it with the first message of a stream only."""
    return message.identifier.log_name if message.HasField("identifier") else None


def _kept_admission(metadata: Any) -> str:
    """What tier.lua kept of the request's admission; "" where there was none."""
    kept = metadata.filter_metadata
    # Indexing a protobuf map would add the key.
    if wire_names.METADATA not in kept:
        return ""
    return str(kept[wire_names.METADATA].fields["admission"].string_value)


def decode_records(name: str, message: Any) -> Iterator[RequestRecord | AttemptRecord]:
    for entry in message.http_logs.log_entry:
        common, response = entry.common_properties, entry.response
        flags = frozenset(field.name for field, _ in common.response_flags.ListFields())
        status = response.response_code.value
        sent = entry.request.request_headers
        got = response.response_headers
        if name.startswith(wire_names.LOG_ATTEMPT_PREFIX):
            first_byte = common.time_to_first_upstream_rx_byte
            yield AttemptRecord(
                upstream=name.removeprefix(wire_names.LOG_ATTEMPT_PREFIX),
                status=status,
                flags=flags,
                fail=got.get(wire_names.FAIL, ""),
                admission=_kept_admission(common.metadata),
                time_to_headers_s=(
                    first_byte.seconds + first_byte.nanos * 1e-9
                    if common.HasField("time_to_first_upstream_rx_byte")
                    else None
                ),
                ended=common.access_log_type != _PERIODIC,
            )
        elif name == wire_names.LOG_REQUEST:
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
            )
