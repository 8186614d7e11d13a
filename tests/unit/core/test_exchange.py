"""Every path that a request can take through the router, as events in and one action out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import CHAT, CODE, NOWHERE, RULES, embedded, make_plan
from hypothesis import given
from hypothesis import strategies as st

from extproc.core import errors, exchange, wire_names
from extproc.core.errors import RouteReason
from extproc.core.exchange import (
    Action,
    Continue,
    Embedded,
    Exchange,
    Forward,
    IllegalEventError,
    NeedEmbedding,
    NotEmbedded,
    Plan,
    RequestBody,
    RequestHeaders,
    Respond,
    State,
)
from extproc.core.routing import RouteRule
from extproc.core.signals import Facts

COMPLETIONS = "/v1/chat/completions"
PLAN = make_plan()
LENIENT = make_plan(unknown_model_takes_default=True)
JSON = "application/json"


def head(
    path: str = COMPLETIONS,
    method: str = "POST",
    *,
    content_type: str = JSON,
    encoding: str = "",
    ends: bool = False,
    named: tuple[tuple[str, str], ...] = (),
) -> RequestHeaders:
    return RequestHeaders(method, path, content_type, encoding, ends, named)


def say(text: str = "hello there", **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def ask(body: bytes, headers: RequestHeaders | None = None, *, plan: Plan = PLAN) -> Action:
    """The action for the body, the headers having been waited upon."""
    talk = Exchange(plan)
    assert talk.receive(headers or head()) == Continue()
    return talk.receive(RequestBody(body))


def ask_with(
    vectors: Embedded | NotEmbedded,
    body: bytes | None = None,
    headers: RequestHeaders | None = None,
) -> Action:
    talk = Exchange(PLAN)
    talk.receive(headers or head())
    assert isinstance(talk.receive(RequestBody(body or say(model="auto"))), NeedEmbedding)
    action = talk.receive(vectors)
    assert talk.state is State.DONE
    return action


def went(action: Action) -> tuple[str, str, str]:
    """Chain, route and reason of what was sent on."""
    assert isinstance(action, Forward)
    return action.chain.name, action.decision.route, action.decision.reason.value


def sent_model(action: Action) -> str | None:
    assert isinstance(action, Forward)
    body = action.mutation().body
    return None if body is None else json.loads(body)["model"]


def refusal(action: Action) -> errors.ErrorKind:
    """The kind of a refusal whose JSON is as promised."""
    assert isinstance(action, Respond)
    error = json.loads(action.body)["error"]
    kind = next(
        k
        for k in vars(errors).values()
        if isinstance(k, errors.ErrorKind) and k.code == action.code
    )
    assert error.keys() == {"message", "type", "param", "code"}
    assert (action.status, error["code"], error["type"]) == (kind.status, kind.code, kind.type)
    assert 400 <= action.status < 500
    return kind


# --- the router decides ---------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"model": "auto"}, {"model": None}, {}])
def test_auto_null_and_missing_model_ask_for_an_embedding(more: dict[str, Any]) -> None:
    assert ask(say("hello there", **more)) == NeedEmbedding("hello there")


def test_body_over_the_limit_is_refused_before_it_is_read() -> None:
    plan = replace(PLAN, max_body_bytes=100)
    talk = Exchange(plan)
    talk.receive(head())
    action = talk.receive(RequestBody(b"{" + b" " * 100))
    assert isinstance(action, Respond)
    assert (action.status, action.code) == (413, "request_too_large")


def test_keyword_decides_without_an_embedding() -> None:
    action = ask(say("what does this Traceback mean", model="auto"))
    assert went(action) == ("route.code", "code", "keyword")
    assert sent_model(action) == "coder-model"


def test_admitted_score_decides() -> None:
    action = ask_with(embedded(CODE))
    assert went(action) == ("route.code", "code", "semantic")


def test_best_paragraph_decides() -> None:
    assert went(ask_with(embedded(NOWHERE, CHAT))) == ("route.chat", "chat", "semantic")


def test_scores_below_every_threshold_take_the_default_route() -> None:
    assert went(ask_with(embedded(NOWHERE))) == ("route.chat", "chat", "default")


@pytest.mark.parametrize(
    "reason",
    [RouteReason.DEGRADED_DEADLINE, RouteReason.DEGRADED_QUEUE_FULL, RouteReason.DEGRADED_WORKER],
)
def test_no_vectors_in_time_take_the_default_route_and_say_why(reason: RouteReason) -> None:
    action = ask_with(NotEmbedded(reason))
    assert went(action) == ("route.chat", "chat", reason.value)
    assert sent_model(action) == "general-model"


@pytest.mark.parametrize("body", [b'{"model":"auto"}', b'{"messages":[]}', b'{"prompt":" \\n"}'])
def test_nothing_to_read_takes_the_default_route(body: bytes) -> None:
    assert went(ask(body)) == ("route.chat", "chat", "default")


def test_without_utterances_nothing_is_embedded() -> None:
    plan = make_plan([RouteRule("chat"), RouteRule("code")])
    assert went(ask(say(model="auto"), plan=plan)) == ("route.chat", "chat", "default")


def test_prompt_of_the_generate_api_is_read() -> None:
    body = b'{"prompt": "a traceback", "max_tokens": 5}'
    action = ask(body, head("/api/v1/generate"))
    assert went(action) == ("route.code", "code", "keyword")
    assert isinstance(action, Forward)
    assert action.mutation().body == b'{"model":"coder-model",' + body[1:]


# --- rules ----------------------------------------------------------------------------------------

RULED = make_plan(
    [
        RouteRule(
            "code",
            utterances=("write a function",),
            keywords=("traceback",),
            patterns=("^SELECT",),
            headers=(("x-team", "data"),),
            has=(errors.Content.TOOLS,),
            min_chars=5000,
        ),
        RouteRule("chat", utterances=("hello", "how are you")),
    ]
)
TEAM = (("x-team", "data"),)


@pytest.mark.parametrize(
    ("body", "named", "reason"),
    [
        (say(model="auto"), TEAM, "header"),
        (say(), TEAM, "header"),
        (b'{"messages":[]}', TEAM, "header"),
        (say(tools=[{"type": "function"}]), (), "content"),
        (say("a" * 5000), (), "length"),
        (say("a traceback"), (), "keyword"),
        (say("SELECT 1"), (), "pattern"),
        (say("SELECT traceback", tools=[{}]), TEAM, "header"),
    ],
)
def test_rule_decides_without_an_embedding(
    body: bytes, named: tuple[tuple[str, str], ...], reason: str
) -> None:
    action = ask(body, head(named=named), plan=RULED)
    assert went(action) == ("route.code", "code", reason)
    assert sent_model(action) == "coder-model"


def test_no_rule_that_matches_leaves_it_to_the_model() -> None:
    action = ask(say("a" * 4999), head(named=(("x-team", "ml"),)), plan=RULED)
    assert isinstance(action, NeedEmbedding)


def test_length_is_that_of_the_whole_conversation() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a" * 1000}] * 5}).encode()
    assert went(ask(body, plan=RULED)) == ("route.code", "code", "length")


def test_rules_do_not_overrule_a_model_that_was_named() -> None:
    action = ask(say("traceback", model="general"), head(named=TEAM), plan=RULED)
    assert went(action) == ("upstream.general", "explicit", "explicit")


def test_rules_are_not_asked_where_no_decision_is() -> None:
    for named in (head("/v1/files", named=TEAM), head("/v1/audio", content_type="x/y", named=TEAM)):
        assert went(ask(b"", named, plan=RULED)) == ("route.chat", "chat", "default")


def test_explanation_shows_every_rule_and_what_matched() -> None:
    action = ask(
        b'{"prompt":"SELECT 1","tools":[{}]}', head("/route", named=(("x-team", "ml"),)), plan=RULED
    )
    assert isinstance(action, Respond)
    explained = json.loads(action.body)
    assert (explained["route"], explained["reason"], explained["matched"]) == (
        "code",
        "content",
        "tools",
    )
    assert [(each["signal"], each["matched"]) for each in explained["signals"]] == [
        ("header", None),
        ("content", "tools"),
        ("length", None),
        ("keyword", None),
        ("pattern", "^SELECT"),
    ]
    assert {(each["route"], each["priority"]) for each in explained["signals"]} == {("code", 0)}


def test_old_message_that_cannot_be_read_is_refused_only_where_it_is_counted() -> None:
    body = b'{"messages":[{"content":"\xff"},{"role":"user","content":"hi"}]}'
    assert ask(body) == NeedEmbedding("hi")
    assert refusal(ask(body, plan=RULED)) is errors.INVALID_JSON


# --- the client decides ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["coder", "vllm-coder", "coder-model"])
def test_upstream_asked_for_by_id_name_or_model_skips_the_embedding(model: str) -> None:
    action = ask(say("a traceback", model=model))
    assert went(action) == ("upstream.coder", "explicit", "explicit")
    assert sent_model(action) == "coder-model"


def test_route_asked_for_by_name_skips_the_embedding() -> None:
    action = ask(say(model="code"))
    assert went(action) == ("route.code", "code", "explicit")
    assert sent_model(action) == "coder-model"


def test_unknown_model_is_refused_with_the_known_names() -> None:
    action = ask(say(model="gpt-17"))
    assert refusal(action) is errors.MODEL_NOT_FOUND
    assert isinstance(action, Respond)
    message = json.loads(action.body)["error"]["message"]
    assert all(name in message for name in PLAN.directory.names)
    assert "gpt-17" not in message


def test_unknown_model_takes_the_default_route_where_configured() -> None:
    action = ask(say(model="gpt-17"), plan=LENIENT)
    assert went(action) == ("route.chat", "chat", "default")
    assert sent_model(action) == "general-model"


# --- answers of the sidecar's own -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?x=1", "/v1/models/"])
def test_model_list_names_aliases_upstreams_and_routes(path: str) -> None:
    action = Exchange(PLAN).receive(head(path, "GET", content_type="", ends=True))
    assert isinstance(action, Respond)
    assert (action.status, action.code) == (200, None)
    listed = json.loads(action.body)
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == list(PLAN.directory.names)
    assert {"auto", "coder", "vllm-coder", "coder-model", "code"} <= set(PLAN.directory.names)


@pytest.mark.parametrize("name", ["coder-model", "coder%2Dmodel"])
def test_one_model_can_be_looked_up(name: str) -> None:
    action = Exchange(PLAN).receive(head(f"/v1/models/{name}", "GET", ends=True))
    assert isinstance(action, Respond)
    assert json.loads(action.body)["id"] == "coder-model"


def test_unknown_model_cannot_be_looked_up() -> None:
    action = Exchange(PLAN).receive(head("/v1/models/gpt-17", "GET", ends=True))
    assert refusal(action) is errors.MODEL_NOT_FOUND


@pytest.mark.parametrize("path", ["/route", "/route?x=1"])
def test_explained_decision_comes_with_scores_and_reaches_no_upstream(path: str) -> None:
    action = ask_with(embedded(CODE), b'{"prompt":"hi"}', head(path))
    assert isinstance(action, Respond)
    assert (action.status, action.code) == (200, None)
    assert json.loads(action.body) == {
        "route": "code",
        "model": "coder-model",
        "upstreams": ["coder", "general"],
        "reason": "semantic",
        "matched": None,
        "signals": [{"route": "code", "signal": "keyword", "priority": 0, "matched": None}],
        "scores": {
            "code": {"score": 1.0, "threshold": 0.28},
            "chat": {"score": 0.0, "threshold": 0.28},
        },
    }


def test_explained_keyword_is_named() -> None:
    action = ask(b'{"prompt":"a TRACEBACK"}', head("/route"))
    assert isinstance(action, Respond)
    explained = json.loads(action.body)
    assert (explained["reason"], explained["matched"], explained["scores"]) == (
        "keyword",
        "TRACEBACK",
        {},
    )


def test_model_in_a_question_for_an_explanation_is_ignored() -> None:
    action = ask(b'{"prompt":"a traceback","model":"nonsense"}', head("/route"))
    assert isinstance(action, Respond)
    assert action.status == 200


@pytest.mark.parametrize("body", [b"{}", b'{"prompt":""}', b'{"prompt":5}', b'{"model":"auto"}'])
def test_explanation_without_a_prompt_is_refused(body: bytes) -> None:
    assert refusal(ask(body, head("/route"))) is errors.INVALID_PROMPT


def test_explanation_takes_post_only() -> None:
    for method in ("GET", "PUT", "DELETE"):
        action = Exchange(PLAN).receive(head("/route", method, ends=True))
        assert refusal(action) is errors.METHOD_NOT_ALLOWED


def test_answers_of_our_own_carry_every_header_of_ours() -> None:
    action = Exchange(PLAN).receive(head("/v1/models", "GET", ends=True))
    assert isinstance(action, Respond)
    assert action.headers == {
        "content-type": "application/json",
        "x-pointsman-route": "none",
        "x-pointsman-reason": "local",
        "x-pointsman-upstream": "none",
        "x-pointsman-model": "none",
        "x-pointsman-attempts": "none",
    }


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", errors.EMPTY_BODY),
        (b"  ", errors.EMPTY_BODY),
        (b"[]", errors.NOT_AN_OBJECT),
        (b"hello", errors.INVALID_JSON),
        (b'{"model":"auto"', errors.INVALID_JSON),
        (b'{"model":"auto","model":"auto"}', errors.DUPLICATE_MODEL),
        (b'{"model":5}', errors.INVALID_MODEL),
        (b'{"messages":{}}', errors.INVALID_MESSAGES),
        (b'{"messages":["hi"]}', errors.INVALID_MESSAGES),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", errors.TOO_DEEP),
        (b"\x1f\x8b\x08\x00", errors.INVALID_JSON),
    ],
)
@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/v1/completions?a=b", "/v1/embeddings", "/v1/responses", "/route"]
)
def test_bad_body_is_refused_where_a_model_is_wanted(
    path: str, body: bytes, kind: errors.ErrorKind
) -> None:
    assert refusal(ask(body, head(path))) is kind


def test_request_without_a_body_is_refused_where_a_model_is_wanted() -> None:
    assert refusal(Exchange(PLAN).receive(head(ends=True))) is errors.EMPTY_BODY


@pytest.mark.parametrize(
    "content_type", ["text/plain", "multipart/form-data; boundary=x", "application/jsonl"]
)
def test_wrong_content_type_is_refused_where_a_model_is_wanted(content_type: str) -> None:
    action = Exchange(PLAN).receive(head(content_type=content_type))
    assert refusal(action) is errors.UNSUPPORTED_MEDIA_TYPE


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json; charset=utf-8", "APPLICATION/JSON", "text/json", "application/x+json"],
)
def test_every_name_of_json_is_accepted(content_type: str) -> None:
    assert Exchange(PLAN).receive(head(content_type=content_type)) == Continue()


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, br"])
def test_encoding_that_envoy_did_not_take_off_is_refused(encoding: str) -> None:
    action = Exchange(PLAN).receive(head(encoding=encoding))
    assert refusal(action) is errors.UNSUPPORTED_ENCODING


def test_identity_encoding_is_none() -> None:
    assert Exchange(PLAN).receive(head(encoding="identity")) == Continue()


# --- other paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD", "OPTIONS"])
def test_requests_without_a_body_pass_through_to_the_default_chain(method: str) -> None:
    action = Exchange(PLAN).receive(head("/v1/files", method, content_type="", ends=True))
    assert went(action) == ("route.chat", "chat", "default")
    assert isinstance(action, Forward)
    mutation = action.mutation()
    assert mutation.body is None
    assert wire_names.MODEL_SPAN not in mutation.headers
    assert "content-length" not in mutation.headers


@pytest.mark.parametrize(
    "headers",
    [
        head("/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x"),
        head("/v1/files", encoding="zstd"),
        head("/v1/files", content_type=""),
    ],
)
def test_other_bodies_pass_through_untouched(headers: RequestHeaders) -> None:
    action = ask(b"\x00--x", headers)
    assert isinstance(action, Forward)
    assert action.chain.name == "route.chat"
    assert action.mutation().body is None


def test_empty_body_passes_through_where_no_model_is_wanted() -> None:
    assert went(ask(b"", head("/v1/files"))) == ("route.chat", "chat", "default")


@pytest.mark.parametrize("body", [b"[1]", b"hello", b'{"model":{"a":1}}', b'{"a":'])
def test_body_that_cannot_name_a_model_passes_through_where_none_is_wanted(body: bytes) -> None:
    action = ask(body, head("/v1/rerank"))
    assert went(action) == ("route.chat", "chat", "degraded_body")
    assert sent_model(action) is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"model":"auto","model":"auto"}', errors.DUPLICATE_MODEL),
        (b'{"model":"auto","messages":"hi"}', errors.INVALID_MESSAGES),
        (b'{"model":"auto","messages":["hi"]}', errors.INVALID_MESSAGES),
        (b'{"model":"auto","a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", errors.TOO_DEEP),
    ],
)
def test_auto_that_cannot_be_replaced_reaches_no_provider_on_any_path(
    body: bytes, kind: errors.ErrorKind
) -> None:
    assert refusal(ask(body, head("/v1/messages/count_tokens"))) is kind


@pytest.mark.parametrize("method", ["POST", "PUT", "GET"])
def test_model_is_rewritten_on_any_path_and_with_any_method(method: str) -> None:
    action = ask(b'{"model":"auto","query":"q"}', head("/v1/rerank", method))
    assert went(action) == ("route.chat", "chat", "default")
    assert sent_model(action) == "general-model"


def test_model_null_is_replaced_on_any_path() -> None:
    assert sent_model(ask(b'{"model":null}', head("/v1/rerank"))) == "general-model"


def test_no_model_is_added_where_none_is_wanted() -> None:
    assert sent_model(ask(b'{"query":"a traceback"}', head("/v1/rerank"))) is None


# --- what is sent on ------------------------------------------------------------------------------


def test_mutation_says_where_the_model_stands_and_how_long_the_body_is() -> None:
    action = ask(say(model="code", stream=True))
    assert isinstance(action, Forward)
    mutation = action.mutation(admission="run.7")
    assert mutation.body is not None
    start, length = map(int, mutation.headers[wire_names.MODEL_SPAN].split(":"))
    assert mutation.body[start : start + length] == b'"coder-model"'
    assert mutation.headers == {
        "x-pointsman-chain": "route.code",
        "x-pointsman-route": "code",
        "x-pointsman-reason": "explicit",
        "x-pointsman-stream": "true",
        "x-pointsman-watch": "1",
        "x-pointsman-model": "coder-model",
        "x-pointsman-model-span": f"{start}:{length}",
        "x-pointsman-admission": "run.7",
        "content-length": str(len(mutation.body)),
    }


@pytest.mark.parametrize(
    ("skip", "model"),
    [
        (("coder",), "general-model"),
        (("general",), "coder-model"),
        (("coder", "general"), "coder-model"),
        (("elsewhere",), "coder-model"),
    ],
)
def test_body_names_the_first_upstream_that_is_not_skipped(
    skip: tuple[str, ...], model: str
) -> None:
    action = ask(say(model="code"))
    assert isinstance(action, Forward)
    mutation = action.mutation(skip=skip)
    assert json.loads(mutation.body or b"")["model"] == model
    assert mutation.headers["x-pointsman-model"] == model
    assert mutation.headers["x-pointsman-skip"] == f",{','.join(skip)},"
    assert f",{skip[0]}," in mutation.headers["x-pointsman-skip"]


def test_request_without_a_body_of_ours_still_skips() -> None:
    action = Exchange(PLAN).receive(head("/v1/files", "GET", ends=True))
    assert isinstance(action, Forward)
    mutation = action.mutation(skip=("general",), admission="run.7")
    assert mutation.headers["x-pointsman-skip"] == ",general,"
    assert mutation.headers["x-pointsman-admission"] == "run.7"


# --- the order of events --------------------------------------------------------------------------

HEADS = st.builds(
    RequestHeaders,
    method=st.sampled_from(["GET", "POST", "PUT", ""]),
    path=st.sampled_from(
        [COMPLETIONS, "/route", "/v1/models", "/v1/models/x", "/v1/rerank", "/", ""]
    )
    | st.text(),
    content_type=st.sampled_from(["", JSON, "text/plain"]) | st.text(),
    content_encoding=st.sampled_from(["", "gzip", "identity"]),
    end_of_stream=st.booleans(),
)
BODIES = st.builds(
    RequestBody,
    st.sampled_from(
        [
            b"",
            b"{",
            b"[]",
            b"{}",
            say(),
            say(model="auto"),
            say(model="code"),
            say("traceback"),
            say(model="?"),
        ]
    )
    | st.binary(max_size=20),
)
VECTORS = st.sampled_from(
    [embedded(CODE), embedded(CHAT, NOWHERE), NotEmbedded(RouteReason.DEGRADED_WORKER)]
)
WANTED = {State.HEADERS: HEADS, State.BODY: BODIES, State.EMBEDDING: VECTORS}


@given(st.data(), st.sampled_from([PLAN, LENIENT, make_plan(RULES[:1])]))
def test_any_legal_order_of_events_gives_one_action_each_and_ends_done(
    data: st.DataObject, plan: Plan
) -> None:
    talk = Exchange(plan)
    seen: list[State] = []
    while talk.state is not State.DONE:
        seen.append(talk.state)
        action = talk.receive(data.draw(WANTED[talk.state]))
        expected = {
            Continue: State.BODY,
            NeedEmbedding: State.EMBEDDING,
            Respond: State.DONE,
            Forward: State.DONE,
        }
        assert talk.state is expected[type(action)]
        if isinstance(action, Forward):
            action.mutation()
    assert seen == [State.HEADERS, State.BODY, State.EMBEDDING][: len(seen)]


@given(st.data())
def test_illegal_event_is_refused_and_changes_nothing(data: st.DataObject) -> None:
    talk = Exchange(PLAN)
    for event in (head(), RequestBody(say()), embedded(CODE)):
        state = talk.state
        wrong = data.draw(
            st.one_of(*(events for wanted, events in WANTED.items() if wanted is not state))
        )
        with pytest.raises(IllegalEventError):
            talk.receive(wrong)
        assert talk.state is state
        talk.receive(event)
    with pytest.raises(IllegalEventError):
        talk.receive(data.draw(st.one_of(*WANTED.values())))


def test_explanation_on_the_command_line_is_that_of_the_path() -> None:
    action = ask_with(embedded(CODE), b'{"prompt":"hi"}', head("/route"))
    assert isinstance(action, Respond)
    decision = went(ask_with(embedded(CODE)))
    forward = ask_with(embedded(CODE))
    assert isinstance(forward, Forward)
    checked = PLAN.signals.check(Facts(b"hi"))
    assert json.loads(action.body) == exchange.explain(PLAN, forward.decision, checked)
    assert decision[1] == "code"
