"""Bytes against an independent implementation of the same protos: what Envoy sends, what it gets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderMap,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Metadata,
)
from envoy_data_plane.envoy.data.accesslog import v3 as log
from envoy_data_plane.envoy.service.accesslog import v3 as als
from envoy_data_plane.envoy.service.ext_proc import v3 as plane
from envoy_data_plane.google.protobuf import Struct
from hypothesis import given
from hypothesis import strategies as st

from extproc.core import accounts
from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.core.errors import INVALID_JSON, error_body
from extproc.core.exchange import Mutation, RequestBody, RequestHeaders, Respond
from extproc.serving import wire

PHASES = {
    "request_headers": plane.HttpHeaders(),
    "response_headers": plane.HttpHeaders(),
    "request_body": plane.HttpBody(body=b"x"),
    "response_body": plane.HttpBody(body=b"x"),
    "request_trailers": plane.HttpTrailers(),
    "response_trailers": plane.HttpTrailers(),
}
REPLIES = (*PHASES, "immediate_response", "streamed_immediate_response")


def received(message: plane.ProcessingRequest) -> Any:
    return wire.ProcessingRequest.FromString(bytes(message))


def seen_by_envoy(reply: Any) -> plane.ProcessingResponse:
    return plane.ProcessingResponse.parse(reply.SerializeToString())


def headers(**values: str) -> plane.HttpHeaders:
    return plane.HttpHeaders(
        headers=HeaderMap(
            headers=[
                HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()
            ]
        )
    )


def phase_of(reply: plane.ProcessingResponse) -> str:
    """The one phase that a reply is for."""
    (phase,) = [name for name in REPLIES if getattr(reply, name) is not None]
    return phase


# --- requests -------------------------------------------------------------------------------------


def test_headers_that_matter_are_read_and_others_are_not() -> None:
    sent = headers(
        **{
            ":method": "POST",
            ":path": "/v1/x?y",
            "content-type": "application/json",
            "content-encoding": " GZIP ",
            "authorization": "Bearer secret",
        }
    )
    sent.end_of_stream = True
    event = wire.decode(received(plane.ProcessingRequest(request_headers=sent)))
    assert event == RequestHeaders(
        "POST", "/v1/x?y", "application/json", "gzip", end_of_stream=True
    )
    assert "secret" not in repr(event)


def test_headers_may_come_as_text_or_not_at_all() -> None:
    old = HeaderMap(headers=[HeaderValue(key=":method", value="GET")])
    message = plane.ProcessingRequest(request_headers=plane.HttpHeaders(headers=old))
    assert wire.decode(received(message)) == RequestHeaders("GET", "", "", "", end_of_stream=False)


def test_headers_that_rules_name_are_read_too_the_last_of_each() -> None:
    sent = HeaderMap(
        headers=[
            HeaderValue(key=key, raw_value=value)
            for key, value in [
                ("x-team", b"client"),
                ("content-type", b"a/b"),
                ("x-team", b"proxy"),
                ("x-other", b"secret"),
                ("x-empty", b""),
            ]
        ]
    )
    message = plane.ProcessingRequest(request_headers=plane.HttpHeaders(headers=sent))
    named = frozenset({"x-team", "x-absent", "x-empty", "content-type"})
    event = wire.decode(received(message), named)
    assert isinstance(event, RequestHeaders)
    assert event.content_type == "a/b"
    assert dict(event.named) == {"x-team": "proxy", "x-empty": "", "content-type": "a/b"}


@given(st.binary(max_size=20), st.text(max_size=10))
def test_bytes_of_any_header_are_read(value: bytes, key: str) -> None:
    sent = HeaderMap(
        headers=[HeaderValue(key=":path", raw_value=value), HeaderValue(key=key, raw_value=value)]
    )
    event = wire.decode(
        received(plane.ProcessingRequest(request_headers=plane.HttpHeaders(headers=sent)))
    )
    assert isinstance(event, RequestHeaders)
    assert event.path == value.decode("latin-1")


@given(st.binary(), st.booleans())
def test_body_is_read_byte_for_byte(body: bytes, end: bool) -> None:
    message = plane.ProcessingRequest(request_body=plane.HttpBody(body=body, end_of_stream=end))
    assert wire.decode(received(message)) == RequestBody(body)


@pytest.mark.parametrize(
    "phase", ["response_headers", "response_body", "request_trailers", "response_trailers"]
)
def test_phases_that_no_exchange_asks_for_hold_no_event(phase: str) -> None:
    assert wire.decode(received(plane.ProcessingRequest(**{phase: PHASES[phase]}))) is None


@pytest.mark.parametrize("phase", PHASES)
def test_neutral_reply_is_of_the_same_phase_and_changes_nothing(phase: str) -> None:
    message = received(plane.ProcessingRequest(**{phase: PHASES[phase]}))
    reply = seen_by_envoy(wire.pass_unchanged(message))
    assert phase_of(reply) == phase
    assert reply == plane.ProcessingResponse(**{phase: type(getattr(reply, phase))()})


# --- replies --------------------------------------------------------------------------------------

TEXT = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=10)


def overwrite(key: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=key, raw_value=value.encode()),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


@given(st.dictionaries(TEXT, TEXT, max_size=4), st.none() | st.binary(), st.booleans())
def test_mutation_carries_headers_and_body_in_one_reply(
    values: dict[str, str], body: bytes | None, early: bool
) -> None:
    reply = seen_by_envoy(wire.encode_mutation(Mutation(values, body), in_headers_phase=early))
    common = plane.CommonResponse(
        header_mutation=plane.HeaderMutation(
            set_headers=[overwrite(*pair) for pair in values.items()]
        ),
        body_mutation=None if body is None else plane.BodyMutation(body=body),
        clear_route_cache=True,
    )
    if early:
        expected = plane.ProcessingResponse(request_headers=plane.HeadersResponse(response=common))
    else:
        expected = plane.ProcessingResponse(request_body=plane.BodyResponse(response=common))
    assert reply == expected


def test_waiting_for_the_body_changes_nothing() -> None:
    assert seen_by_envoy(wire.CONTINUE) == plane.ProcessingResponse(
        request_headers=plane.HeadersResponse()
    )


@pytest.mark.parametrize("status", [200, 400, 404, 405, 408, 413, 415, 431, 503])
def test_answer_of_our_own_is_sent_whole(status: int) -> None:
    respond = Respond(status, error_body(INVALID_JSON), "invalid_json")
    answer = seen_by_envoy(wire.encode_respond(respond)).immediate_response
    assert answer is not None
    assert answer.status is not None
    assert int(answer.status.code) == status
    assert answer.body == respond.body
    assert answer.details == "invalid_json"
    assert answer.headers is not None
    assert answer.headers.set_headers == [overwrite(*pair) for pair in respond.headers.items()]


def test_answer_that_is_no_error_has_details_without_spaces() -> None:
    answer = seen_by_envoy(wire.encode_respond(Respond(200, b"{}"))).immediate_response
    assert answer is not None
    assert answer.details
    assert " " not in answer.details


# --- the first-token watch ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "end", "expected"),
    [
        ("text/event-stream", False, True),
        ("text/event-stream; charset=utf-8", False, True),
        ("text/event-stream", True, False),
        ("application/json", False, False),
    ],
)
def test_only_an_open_event_stream_is_worth_watching(
    content_type: str, end: bool, expected: bool
) -> None:
    sent = headers(**{":status": "200", "content-type": content_type})
    sent.end_of_stream = end
    message = received(plane.ProcessingRequest(response_headers=sent))
    assert wire.is_response_phase(message)
    assert wire.begins_stream(message) is expected


def test_a_body_begins_no_stream() -> None:
    message = received(plane.ProcessingRequest(response_body=plane.HttpBody(body=b"data: 1")))
    assert wire.is_response_phase(message)
    assert not wire.begins_stream(message)


# --- access log records ---------------------------------------------------------------------------


ADMITTED = {"pointsman": {"admitted": True}}
"""What Envoy's filters leave on every request that they see."""


def logged(*entries: log.HttpAccessLogEntry, name: str | None = "request") -> Any:
    message = als.StreamAccessLogsMessage(
        identifier=None if name is None else als.StreamAccessLogsMessageIdentifier(log_name=name),
        http_logs=als.StreamAccessLogsMessageHttpAccessLogEntries(log_entry=list(entries)),
    )
    return wire.AccessLogMessage.FromString(bytes(message))


def entry(
    status: int | None = 200,
    *,
    flags: log.ResponseFlags | None = None,
    sent: dict[str, str] | None = None,
    got: dict[str, str] | None = None,
    first_byte: timedelta | None = None,
    metadata: dict[str, dict[str, Any]] | None = None,
    kind: log.AccessLogType = log.AccessLogType.DownstreamEnd,
) -> log.HttpAccessLogEntry:
    return log.HttpAccessLogEntry(
        common_properties=log.AccessLogCommon(
            response_flags=flags,
            time_to_first_upstream_rx_byte=first_byte,
            access_log_type=kind,
            metadata=Metadata(
                filter_metadata={
                    name: Struct.from_dict(values)
                    for name, values in (ADMITTED if metadata is None else metadata).items()
                }
            ),
        ),
        request=log.HttpRequestProperties(request_id="id-1", request_headers=sent or {}),
        response=log.HttpResponseProperties(response_code=status, response_headers=got or {}),
    )


def test_request_record_is_read_whole() -> None:
    message = logged(
        entry(
            sent={
                "x-pointsman-route": "code",
                "x-pointsman-reason": "semantic",
                "x-pointsman-skip": ",a,b,",
                "x-pointsman-admission": "run.7",
                "x-pointsman-attempts": "stale",
            },
            got={
                "x-pointsman-upstream": "vllm",
                "x-pointsman-attempts": "a:timeout,vllm:200",
                "x-pointsman-fallback": "timeout",
            },
            flags=log.ResponseFlags(upstream_protocol_error=True),
        )
    )
    assert wire.log_name(message) == "request"
    assert list(wire.decode_records("request", message)) == [
        RequestRecord(
            status=200,
            flags=frozenset({"upstream_protocol_error"}),
            route="code",
            reason="semantic",
            upstream="vllm",
            attempts="a:timeout,vllm:200",
            fallback="timeout",
            skip=frozenset({"a", "b"}),
            admission="run.7",
            request_id="id-1",
        )
    ]


def test_record_of_a_client_that_left_keeps_the_story_of_the_request() -> None:
    message = logged(
        entry(
            None,
            sent={"x-pointsman-attempts": "a:timeout,b:", "x-pointsman-fallback": "timeout"},
            flags=log.ResponseFlags(downstream_connection_termination=True),
        )
    )
    (record,) = wire.decode_records("request", message)
    assert isinstance(record, RequestRecord)
    assert (record.status, record.attempts, record.fallback) == (0, "a:timeout,b:", "timeout")


def test_attempt_record_is_read_whole() -> None:
    message = logged(
        entry(
            504,
            # The router has taken our headers off by then; tier.lua kept a copy.
            metadata={"pointsman": {"admission": "run.7,a:3"}, "other": {"admission": "x"}},
            got={"x-pointsman-fail": "timeout"},
            flags=log.ResponseFlags(upstream_request_timeout=True),
            first_byte=timedelta(seconds=1, milliseconds=250),
        ),
        entry(200, kind=log.AccessLogType.DownstreamPeriodic),
        name="attempt.a.b",
    )
    assert list(wire.decode_records("attempt.a.b", message)) == [
        AttemptRecord(
            upstream="a.b",
            status=504,
            flags=frozenset({"upstream_request_timeout"}),
            fail="timeout",
            admission="run.7,a:3",
            time_to_headers_s=pytest.approx(1.25),
        ),
        AttemptRecord(upstream="a.b", status=200, flags=frozenset(), ended=False),
    ]


@pytest.mark.parametrize("metadata", [{}, {"pointsman": {}}, {"other": {"admission": "x"}}])
def test_attempt_of_a_request_that_passed_the_sidecar_by_has_no_admission(
    metadata: dict[str, dict[str, str]],
) -> None:
    (record,) = wire.decode_records("attempt.a", logged(entry(metadata=metadata), name="attempt.a"))
    assert record.admission == ""


def test_name_of_the_log_comes_with_the_first_message_only() -> None:
    assert wire.log_name(logged(entry(), name=None)) is None


@pytest.mark.parametrize("name", ["", "somebody-elses", "attempts"])
def test_other_logs_hold_no_records(name: str) -> None:
    assert list(wire.decode_records(name, logged(entry(), name=name))) == []


@given(st.builds(log.HttpAccessLogEntry))
@pytest.mark.parametrize("name", ["request", "attempt.a"])
def test_bare_entry_is_still_a_record(name: str, bare: log.HttpAccessLogEntry) -> None:
    (record,) = wire.decode_records(name, logged(bare, name=name))
    assert record.status == 0
    assert record.flags == frozenset()


def test_flags_that_accounts_know_are_fields_of_the_proto() -> None:
    known = set(log.ResponseFlags.__dataclass_fields__)
    assert known >= accounts._CLIENT_LEFT | accounts._CUT


def test_attempt_tells_its_times_route_and_usage() -> None:
    kept = {"route": "code", "prompt_tokens": 7.0, "completion_tokens": 11.0}
    message = logged(
        log.HttpAccessLogEntry(
            common_properties=log.AccessLogCommon(
                time_to_last_upstream_rx_byte=timedelta(seconds=2),
                custom_tags={"first_chunk_us": "1500000"},
                metadata=Metadata(filter_metadata={"pointsman": Struct.from_dict(kept)}),
            ),
            response=log.HttpResponseProperties(
                response_code=200, response_headers={"content-type": "text/event-stream; x=y"}
            ),
        ),
        name="attempt.a",
    )
    (record,) = wire.decode_records("attempt.a", message)
    assert isinstance(record, AttemptRecord)
    assert (record.route, record.is_stream) == ("code", True)
    assert (record.time_to_first_chunk_s, record.time_to_last_byte_s) == (1.5, 2.0)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 11)


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf"), 1e300, "7", True, [7.0], None])
def test_usage_that_is_no_count_is_not_believed(count: object) -> None:
    message = logged(entry(metadata={"pointsman": {"prompt_tokens": count}}), name="attempt.a")
    (record,) = wire.decode_records("attempt.a", message)
    assert isinstance(record, AttemptRecord)
    assert record.prompt_tokens is None


@pytest.mark.parametrize("text", ["-", "", "-5", "1.5", "²"])
def test_moment_that_never_came_is_none(text: str) -> None:
    assert wire._micros(text) is None


def test_request_that_envoy_refused_at_once_says_nothing_in_our_name() -> None:
    forged = {
        "x-pointsman-route": "code",
        "x-pointsman-reason": "degraded_bypassed",
        "x-pointsman-attempts": "a:timeout,b:200",
        "x-pointsman-admission": "run.7",
    }
    (record,) = wire.decode_records("request", logged(entry(400, sent=forged, metadata={})))
    assert record == RequestRecord(status=400, flags=frozenset(), request_id="id-1")


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="~")),
    bad=st.binary(min_size=5, max_size=99),
)
def test_an_id_of_any_bytes_from_a_client_costs_no_record(text: str, bad: bytes) -> None:
    message = logged(entry(sent={"x-pointsman-route": text}), entry())
    for each in message.http_logs.log_entry:
        each.common_properties.sample_rate = 0.5  # another wire type beside it
        each.common_properties.stream_id = "~" * len(bad)
    raw = message.SerializeToString().replace(b"~" * len(bad), bad)
    assert raw.count(bad) >= 2
    found = wire.decode_log(raw)
    for each in found.http_logs.log_entry:
        assert len(each.common_properties.stream_id.encode()) == len(bad)
        each.common_properties.stream_id = "~" * len(bad)
    assert found == message
