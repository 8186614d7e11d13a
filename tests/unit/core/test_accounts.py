"""Records as Envoy sends them, and as nobody should: each has one outcome and no surprise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.accounts import (
    AttemptRecord,
    Hop,
    RequestRecord,
    Verdict,
    hops,
    outcome,
    passed_over,
    verdict,
)
from extproc.core.errors import FallbackReason, Outcome

LEFT = "downstream_connection_termination"
CUT = "upstream_protocol_error"
UNREADABLE = "downstream_protocol_error"
TEXT = st.text(st.sampled_from("ab:,5 ") | st.characters()) | st.sampled_from(
    [
        "rule",
        "timeout",
        "circuit_open",
        "a:timeout,b:200",
        "a:5xx,a:200",
        ",:,",
        "::",
        "a:circuit_open,",
    ]
)
FLAGS = st.frozensets(st.sampled_from([LEFT, CUT, UNREADABLE, "no_healthy_upstream", "unheard_of"]))


def request(status: int, *flags: str, upstream: str = "a", fallback: str = "") -> RequestRecord:
    return RequestRecord(
        status=status, flags=frozenset(flags), upstream=upstream, fallback=fallback
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (request(200), Outcome.SERVED),
        (request(302), Outcome.SERVED),
        (request(200, upstream=""), Outcome.SERVED),  # the model list, an explanation
        (request(200, fallback="timeout"), Outcome.SERVED_BY_FALLBACK),
        (request(200, upstream="rule", fallback="timeout"), Outcome.SERVED_BY_RULE),
        (request(200, upstream="rule"), Outcome.SERVED_BY_RULE),
        (request(200, CUT), Outcome.STREAM_CUT),
        (request(200, "stream_idle_timeout", fallback="5xx"), Outcome.STREAM_CUT),
        (request(200, LEFT), Outcome.CLIENT_GONE),
        (request(200, LEFT, CUT), Outcome.CLIENT_GONE),
        (request(0, LEFT), Outcome.CLIENT_GONE),
        (request(0), Outcome.CLIENT_GONE),
        (request(400, upstream=""), Outcome.REJECTED),
        (request(404), Outcome.REJECTED),
        (request(413, "request_header_too_large"), Outcome.REJECTED),
        (request(429), Outcome.FAILED),
        (request(429, fallback="rate_limited"), Outcome.FAILED),
        (request(500), Outcome.FAILED),
        (request(503, "no_healthy_upstream", upstream=""), Outcome.FAILED),
        (request(504, "upstream_request_timeout"), Outcome.FAILED),
        (request(503, upstream="rule"), Outcome.FAILED),  # no canned text passes for an embedding
        (request(500, LEFT), Outcome.CLIENT_GONE),
        (request(400, UNREADABLE, upstream=""), Outcome.REJECTED),  # told, and then cut off
        (request(426, UNREADABLE, upstream=""), Outcome.REJECTED),
        (request(400, UNREADABLE, LEFT), Outcome.CLIENT_GONE),
        (request(200, UNREADABLE), Outcome.CLIENT_GONE),  # garbage while it got its answer
        (request(0, UNREADABLE), Outcome.CLIENT_GONE),
    ],
)
def test_request_ends_in_the_outcome_that_its_record_tells(
    record: RequestRecord, expected: Outcome
) -> None:
    assert outcome(record) is expected


@given(
    st.builds(
        RequestRecord,
        status=st.integers(-1, 1000),
        flags=FLAGS,
        upstream=TEXT,
        attempts=TEXT,
        fallback=TEXT,
    )
)
def test_any_record_has_an_outcome(record: RequestRecord) -> None:
    assert isinstance(outcome(record), Outcome)
    passed_over(record)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ("", []),
        ("a:200", []),
        ("a:timeout,b:200", [("timeout", "a", "b")]),
        ("a:timeout,b:5xx,rule:200", [("timeout", "a", "b"), ("5xx", "b", "rule")]),
        ("a:circuit_open,b:200", [("circuit_open", "a", "b")]),
        ("a:retried,a:503,b:200", []),
        ("a:retried,a:5xx,b:200", [("5xx", "a", "b")]),
        ("a:5xx,a:5xx,b:200", [("5xx", "a", "b")]),
        ("a:timeout", []),  # the chain ended there
        ("a:timeout,b:", [("timeout", "a", "b")]),  # the client left while b was asked
        ("a:,b:200", []),
        ("a:200,b:200", []),
        ("a:nonsense,b:200", []),
        ("a:timeout,,b:200,", [("timeout", "a", "b")]),
        ("a,b", []),
    ],
)
def test_attempts_tell_the_steps_of_the_chain(
    attempts: str, expected: list[tuple[str, str, str]]
) -> None:
    assert [(hop.reason.value, hop.source, hop.target) for hop in hops(attempts)] == expected


@given(TEXT)
def test_hostile_attempts_tell_of_known_reasons_or_nothing(attempts: str) -> None:
    for hop in hops(attempts):
        assert isinstance(hop, Hop)
        assert hop.reason in FallbackReason
        assert hop.source != hop.target
        assert "," not in hop.source + hop.target


def test_upstreams_passed_over_are_those_whose_circuit_was_open_in_order() -> None:
    record = RequestRecord(
        200, frozenset(), attempts="a:circuit_open,b:timeout,c:circuit_open,rule:200"
    )
    assert passed_over(record) == ["a", "c"]


def attempt(status: int, *flags: str, fail: str = "", ended: bool = True) -> AttemptRecord:
    return AttemptRecord("a", status, frozenset(flags), fail=fail, ended=ended)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (attempt(200), Verdict.SUCCEEDED),
        (attempt(400), Verdict.SUCCEEDED),  # the client's own error: the upstream works
        (attempt(504, "upstream_request_timeout", fail="timeout"), Verdict.FAILED),
        (attempt(460, fail="rate_limited"), Verdict.FAILED),
        (attempt(502, fail="bad_schema"), Verdict.FAILED),
        (attempt(0, LEFT, fail="timeout"), Verdict.FAILED),
        (attempt(460, fail="circuit_open"), Verdict.NOTHING),
        (attempt(0, LEFT), Verdict.NOTHING),
        (attempt(0), Verdict.NOTHING),
        (attempt(200, LEFT), Verdict.NOTHING),
        (attempt(200, CUT), Verdict.NOTHING),
        (attempt(200, "stream_idle_timeout"), Verdict.NOTHING),
        (attempt(200, fail="nonsense"), Verdict.SUCCEEDED),
        (attempt(200, ended=False), Verdict.SUCCEEDED),  # a stream whose headers are in
        (attempt(0, ended=False), Verdict.PENDING),
        (attempt(502, fail="5xx", ended=False), Verdict.PENDING),  # its end will count, once
        (attempt(200, CUT, ended=False), Verdict.PENDING),
    ],
)
def test_attempt_says_of_its_upstream_what_its_record_tells(
    record: AttemptRecord, expected: Verdict
) -> None:
    assert verdict(record) is expected


@given(
    st.builds(
        AttemptRecord,
        upstream=TEXT,
        status=st.integers(-1, 1000),
        flags=FLAGS,
        fail=TEXT,
        ended=st.booleans(),
    )
)
def test_any_attempt_has_a_verdict_and_failed_ones_a_reason(record: AttemptRecord) -> None:
    if verdict(record) is Verdict.FAILED:
        assert FallbackReason(record.fail) is not FallbackReason.CIRCUIT_OPEN


STREAMED = AttemptRecord(
    upstream="a",
    status=200,
    flags=frozenset(),
    is_stream=True,
    time_to_first_chunk_s=1.0,
    time_to_last_byte_s=3.0,
    completion_tokens=5,
)


@pytest.mark.parametrize(
    ("changed", "gap_s"),
    [
        ({}, 0.5),
        ({"is_stream": False}, None),
        ({"completion_tokens": None}, None),
        ({"completion_tokens": 1}, None),
        ({"completion_tokens": 0}, None),
        ({"time_to_first_chunk_s": None}, None),
        ({"time_to_last_byte_s": None}, None),
        ({"time_to_last_byte_s": 0.9}, 0.0),
    ],
)
def test_gap_between_tokens_is_a_mean_where_the_record_can_tell(
    changed: dict[str, object], gap_s: float | None
) -> None:
    assert replace(STREAMED, **changed).token_gap_s == gap_s
