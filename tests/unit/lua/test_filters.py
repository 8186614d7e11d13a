"""The three filters with the constants that they are rendered with, on a handle like Envoy's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bodies import bodies, members
from hypothesis import given, settings

from extproc.core import wire_names

SIDECAR_IS_DEAD = {
    "chain": "route.chat",
    "route": "chat",
    "reason": "degraded_bypassed",
    "model": '"default-model"',
    "model_name": "default-model",
    "invalid": '{"error":{"code":"invalid_json"}}',
    "duplicate": '{"error":{"code":"duplicate_model"}}',
    "bad_request": '{"error":{"code":"bad_request"}}',
    "model_paths": ",".join(wire_names.MODEL_PATHS),
}
TIER = {
    "name": "vllm-b",
    "model_name": "model-b",
    "model": '"model-b"',
    "counted": ",5xx,connect_error,timeout,",
}
CHAT = "/v1/chat/completions"
JSON = "application/json"
ANSWER = b'{"id":"x","choices":[{"index":0}]}'


# --- ingress: a request that passed the sidecar by ------------------------------------------------


@pytest.fixture(scope="module")
def ingress(load: Any) -> Any:
    return load("ingress.lua", SIDECAR_IS_DEAD, json=True)


def test_request_that_the_sidecar_decided_is_left_alone(ingress: Any) -> None:
    talk = ingress.exchange(
        b'{"model":"auto"}', path=CHAT, x_pointsman_chain="route.code"
    ).on_request()
    assert dict(talk.request) == {":path": CHAT, "x-pointsman-chain": "route.code"}
    assert not talk.seen.buffered


def test_request_that_passed_the_sidecar_by_takes_the_default_route_and_says_so(
    ingress: Any,
) -> None:
    raw = b'{"model" : "auto", "stream": true}'
    talk = ingress.exchange(
        raw, path=CHAT, content_type=JSON, content_length=str(len(raw))
    ).on_request()
    assert talk.body == b'{"model" : "default-model", "stream": true}'
    assert dict(talk.request) == {
        ":path": CHAT,
        "content-type": JSON,
        "content-length": str(len(talk.body)),
        "x-pointsman-chain": "route.chat",
        "x-pointsman-route": "chat",
        "x-pointsman-reason": "degraded_bypassed",
        "x-pointsman-stream": "true",
        "x-pointsman-model": "default-model",
        "x-pointsman-model-span": "11:15",
    }
    assert talk.seen.cleared


@settings(max_examples=60)
@given(raw=bodies())
def test_model_is_replaced_and_nothing_else(ingress: Any, raw: bytes) -> None:
    talk = ingress.exchange(raw, path=CHAT, content_type=JSON).on_request()
    found = [(at, end) for key, at, end in members(raw) if key == "model"]
    if len(found) > 1:  # as the sidecar does
        assert (talk.seen.status, talk.seen.answer) == ("400", SIDECAR_IS_DEAD["duplicate"])
        return
    value = b'"default-model"'
    start, length = map(int, talk.request["x-pointsman-model-span"].split(":"))
    assert talk.body[start : start + length] == value
    if found:
        ((at, end),) = found
        assert talk.body == raw[:at] + value + raw[end:]
    else:
        at = raw.index(b"{") + 1
        comma = b"," if members(raw) else b""
        assert talk.body == raw[:at] + b'"model":' + value + comma + raw[at:]
        json.loads(talk.body)


def test_model_is_added_only_where_a_path_takes_one(ingress: Any) -> None:
    for path, wanted in (("/v1/rerank", b'{"query":"x"}'), ("/v1/embeddings/?a=b", None)):
        talk = ingress.exchange(b'{"query":"x"}', path=path, content_type=JSON).on_request()
        assert talk.body == (wanted or b'{"model":"default-model","query":"x"}')
    talk = ingress.exchange(b'{"model":"auto"}', path="/v1/rerank", content_type=JSON)
    assert talk.on_request().body == b'{"model":"default-model"}'


def test_json_is_json_in_any_case(ingress: Any) -> None:
    talk = ingress.exchange(b'{"model":"auto"}', path=CHAT, content_type="Application/JSON")
    assert talk.on_request().body == b'{"model":"default-model"}'


@pytest.mark.parametrize("raw", [b'{"model":"auto"', b"[]", b"auto", b'{"model":"auto"}{}'])
def test_torn_body_is_refused_where_auto_might_hide_in_it(ingress: Any, raw: bytes) -> None:
    talk = ingress.exchange(raw, path=CHAT + "?x=1", content_type=JSON).on_request()
    assert (talk.seen.status, talk.seen.answer) == ("400", SIDECAR_IS_DEAD["invalid"])


def test_body_that_is_no_json_passes_where_no_completion_is_asked_for(ingress: Any) -> None:
    for content_type, raw in (
        (JSON, b"[1]"),
        ("multipart/form-data; boundary=x", b"--x"),
        ("", b""),
    ):
        talk = ingress.exchange(raw, path="/v1/files", content_type=content_type).on_request()
        assert talk.body == raw
        assert talk.request["x-pointsman-chain"] == "route.chat"
        assert talk.seen.cleared


def test_final_failure_gets_its_own_status_back(ingress: Any) -> None:
    talk = ingress.exchange(path=CHAT)
    talk.on_response(460, x_pointsman_status="429", x_pointsman_fail="rate_limited")
    assert dict(talk.response) == {":status": "429"}


# --- tier: the model on its way, the answer on its way back ---------------------------------------


@pytest.fixture(scope="module")
def tier(load: Any) -> Any:
    return load("tier.lua", TIER, json=True)


def test_body_that_names_another_upstream_gets_this_ones_model(tier: Any) -> None:
    raw = b'{"model" : "auto", "n":9007199254740993}'
    talk = tier.exchange(
        raw,
        x_pointsman_model="model-a",
        x_pointsman_model_span="11:6",
        content_length=str(len(raw)),
    ).on_request()
    assert talk.body == b'{"model" : "model-b", "n":9007199254740993}'
    assert talk.request["content-length"] == str(len(talk.body))
    assert talk.request["x-pointsman-model"] == "model-b"


def test_body_that_names_this_upstream_is_not_touched(tier: Any) -> None:
    talk = tier.exchange(
        b'{"model":"model-b"}', x_pointsman_model="model-b", x_pointsman_model_span="9:9"
    ).on_request()
    assert not talk.seen.buffered


def test_request_without_a_model_is_not_touched(tier: Any) -> None:
    talk = tier.exchange(b"--x").on_request()
    assert not talk.seen.buffered
    assert talk.request["x-pointsman-model"] == "model-b"


def test_admission_is_kept_for_the_account(tier: Any) -> None:
    talk = tier.exchange(x_pointsman_admission="run.7,b:3").on_request()
    assert dict(talk.seen.metadata) == {"pointsman.admission": "run.7,b:3"}
    assert dict(tier.exchange().on_request().seen.metadata) == {}


def answered(
    tier: Any, status: int, body: bytes = ANSWER, *, path: str = CHAT, **headers: str
) -> dict[str, str]:
    headers.setdefault("content_type", JSON)
    talk = tier.exchange(path=path).on_response(status, body, **headers)
    assert talk.response["x-pointsman-upstream"] == "vllm-b"
    assert talk.response["x-pointsman-model"] == "model-b"
    found = dict(talk.response)
    return {
        key: found[key]
        for key in (":status", "x-pointsman-fail", "x-pointsman-status")
        if key in found
    }


def test_good_answer_is_passed_on(tier: Any) -> None:
    assert answered(tier, 200) == {":status": "200"}


@pytest.mark.parametrize("status", [500, 502, 503, 504, 529])
def test_failure_of_the_provider_is_labelled_and_counted(tier: Any, status: int) -> None:
    assert answered(tier, status) == {":status": str(status), "x-pointsman-fail": "5xx"}


def test_rate_limit_is_labelled_and_not_counted(tier: Any) -> None:
    assert answered(tier, 429) == {":status": "429", "x-pointsman-fail": "rate_limited"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[ ]}',
        b'{"choices":{}}',
        b'{"choices":[{"a":1}',
        b'{"x":{"choices":[1]}}',
    ],
)
def test_answer_that_no_client_can_read_becomes_a_failure(tier: Any, body: bytes) -> None:
    assert answered(tier, 200, body) == {
        ":status": "460",
        "x-pointsman-fail": "bad_schema",
        "x-pointsman-status": "502",
    }


@pytest.mark.parametrize(
    "body", [ANSWER, b' { "choices" : [ 1 ] } \n', b'{"choices":[{"m":"]}"}]}']
)
def test_answer_with_choices_is_readable_however_it_is_written(tier: Any, body: bytes) -> None:
    assert answered(tier, 200, body) == {":status": "200"}


def test_media_types_are_known_in_any_case(tier: Any) -> None:
    assert answered(tier, 200, content_type="Application/JSON") == {":status": "200"}
    assert answered(tier, 200, b"", content_type="Text/Event-Stream") == {":status": "200"}


def test_html_with_status_200_becomes_a_failure(tier: Any) -> None:
    assert answered(tier, 200, content_type="text/html")["x-pointsman-fail"] == "bad_schema"


def test_stream_is_never_buffered(tier: Any) -> None:
    talk = tier.exchange(path=CHAT).on_response(200, b"", content_type="text/event-stream")
    assert not talk.seen.buffered
    assert talk.response["x-pointsman-fail"] is None


@pytest.mark.parametrize("path", ["/v1/models", "/v1/embeddings", "/v1/chat/completions/x"])
def test_other_answers_are_nobodys_to_judge(tier: Any, path: str) -> None:
    assert answered(tier, 200, b"[]", path=path) == {":status": "200"}


def test_compressed_answer_is_not_judged(tier: Any) -> None:
    assert answered(tier, 200, b"\x1f\x8b", content_encoding="gzip") == {":status": "200"}


def test_error_of_the_client_is_passed_on(tier: Any) -> None:
    assert answered(tier, 400, b'{"error":{"code":"bad"}}') == {":status": "400"}
    assert answered(tier, 404) == {":status": "404"}


def test_prompt_that_is_too_long_here_may_fit_elsewhere(tier: Any) -> None:
    found = answered(tier, 400, b'{"error":{"code":"context_length_exceeded"}}')
    assert found == {":status": "400", "x-pointsman-fail": "context_length"}


def test_failure_that_envoy_labelled_keeps_its_label(tier: Any) -> None:
    assert answered(tier, 504, x_pointsman_fail="timeout") == {
        ":status": "504",
        "x-pointsman-fail": "timeout",
    }
    assert answered(tier, 460, x_pointsman_fail="circuit_open")[":status"] == "460"


@pytest.mark.parametrize(
    ("counted", "status", "fail", "travels", "own"),
    [
        (",rate_limited,", 429, None, "502", "429"),  # counted: outlier detection sees a 5xx
        (",bad_schema,", 200, None, "502", "502"),
        (",timeout,", 503, None, "460", "503"),  # not counted: it sees none
        (",5xx,", 504, "timeout", "460", "504"),
        (",timeout,", 504, "timeout", "504", None),
    ],
)
def test_outlier_detection_sees_what_is_counted_and_nothing_else(
    load: Any, counted: str, status: int, fail: str | None, travels: str, own: str | None
) -> None:
    tier = load("tier.lua", {**TIER, "counted": counted}, json=True)
    labels = {} if fail is None else {"x_pointsman_fail": fail}
    found = answered(tier, status, b"{}", **labels)
    assert (found[":status"], found.get("x-pointsman-status")) == (travels, own)


# --- chain: the story of the attempts -------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(load: Any) -> Any:
    return load("chain.lua", {"members": ",a,b,rule,"}, json=False)


class Story:
    """One request through a chain, attempt by attempt."""

    def __init__(self, chain: Any) -> None:
        self._talk = chain.exchange()

    def attempt(
        self, name: str, status: int | None = None, fail: str | None = None, *, tries: int = 1
    ) -> Story:
        self._talk.request["x-pointsman-upstream"] = name
        self._talk._handle.begin(self._talk._handle, self._talk.request, "")
        self._talk.on_request()
        if status is not None:
            headers = {} if fail is None else {"x_pointsman_fail": fail}
            if tries > 1:
                headers["x_envoy_attempt_count"] = str(tries)
            self._talk.on_response(status, **headers)
            assert self._talk.response["x-envoy-attempt-count"] is None
        return self

    @property
    def told(self) -> tuple[str, str | None]:
        response = self._talk.response
        return response["x-pointsman-attempts"], response["x-pointsman-fallback"]

    @property
    def kept(self) -> tuple[str, str | None]:
        """What a client that leaves now leaves in the account."""
        request = self._talk.request
        return request["x-pointsman-attempts"], request["x-pointsman-fallback"]


def test_first_answer_is_the_whole_story(chain: Any) -> None:
    assert Story(chain).attempt("a", 200).told == ("a:200", None)


def test_each_failure_is_told_and_the_first_reason_stays(chain: Any) -> None:
    story = Story(chain).attempt("a", 504, "timeout").attempt("b", 502, "5xx").attempt("rule", 200)
    assert story.told == ("a:timeout,b:5xx,rule:200", "timeout")


def test_attempt_under_way_is_in_the_account(chain: Any) -> None:
    assert Story(chain).attempt("a").kept == ("a:", None)
    assert Story(chain).attempt("a", 504, "timeout").attempt("b").kept == (
        "a:timeout,b:",
        "timeout",
    )


def test_attempt_without_any_answer_was_a_timeout(chain: Any) -> None:
    assert Story(chain).attempt("a").attempt("b", 200).told == ("a:timeout,b:200", "timeout")


def test_members_that_were_ejected_are_told(chain: Any) -> None:
    assert Story(chain).attempt("b", 200).told == ("a:circuit_open,b:200", "circuit_open")
    assert Story(chain).attempt("rule", 200).told == (
        "a:circuit_open,b:circuit_open,rule:200",
        "circuit_open",
    )
    story = Story(chain).attempt("a", 504, "timeout").attempt("rule", 200)
    assert story.told == ("a:timeout,b:circuit_open,rule:200", "timeout")


def test_skipped_upstream_answers_for_itself(chain: Any) -> None:
    assert Story(chain).attempt("a", 460, "circuit_open").attempt("b", 200).told == (
        "a:circuit_open,b:200",
        "circuit_open",
    )


def test_tries_on_the_same_upstream_are_told(chain: Any) -> None:
    assert Story(chain).attempt("a", 200, tries=3).told == ("a:retried,a:retried,a:200", None)
    story = Story(chain).attempt("a", 503, "5xx", tries=2).attempt("b", 200)
    assert story.told == ("a:retried,a:5xx,b:200", "5xx")


def test_names_that_contain_each_other_are_told_apart(load: Any) -> None:
    chain = load("chain.lua", {"members": ",a-b.c,b,a-b,rule,"}, json=False)
    assert Story(chain).attempt("a-b.c", 502, "5xx").attempt("a-b", 200).told == (
        "a-b.c:5xx,b:circuit_open,a-b:200",
        "5xx",
    )
    assert Story(chain).attempt("a-b.c", 200, tries=2).told == ("a-b.c:retried,a-b.c:200", None)


def usage_of(tier: Any, usage: str, **headers: str) -> dict[str, Any]:
    body = b'{"choices":[{}],"usage":' + usage.encode() + b"}"
    path = headers.pop("path", CHAT)
    headers.setdefault("content_type", JSON)
    talk = tier.exchange(path=path, **{":method": "POST"}).on_response(200, body, **headers)
    return dict(talk.seen.metadata)


def test_usage_of_a_completion_is_kept_for_the_account(tier: Any) -> None:
    kept = usage_of(tier, '{"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}')
    assert kept == {"pointsman.prompt_tokens": 7, "pointsman.completion_tokens": 5}


@pytest.mark.parametrize(
    "usage",
    [
        "null",
        "[]",
        '"7"',
        "{}",
        '{"prompt_tokens": -1}',
        '{"prompt_tokens": 1.5}',
        '{"a": {"prompt_tokens": 7}}',
    ],
)
def test_usage_that_is_none_is_not_kept(tier: Any, usage: str) -> None:
    assert usage_of(tier, usage) == {}


@pytest.mark.parametrize(
    ("length", "kept"), [("99", True), (None, False), ("1048577", False), ("x", False)]
)
def test_other_answers_are_read_only_where_they_say_that_they_are_small(
    tier: Any, length: str | None, kept: bool
) -> None:
    headers = {} if length is None else {"content_length": length}
    found = usage_of(tier, '{"prompt_tokens": 7}', path="/v1/embeddings", **headers)
    assert found == ({"pointsman.prompt_tokens": 7} if kept else {})
