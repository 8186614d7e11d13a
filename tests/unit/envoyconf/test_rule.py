"""The last resort, read as a client would: whatever the configured text, it arrives."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from extproc.envoyconf import rule
from extproc.envoyconf.bootstrap import _Dumper

CHAT = "/v1/chat/completions"


def evaluated(text: str) -> str:
    """What Envoy makes of a format string; an operator that we did not mean is an error."""

    def operator(found: re.Match[str]) -> str:
        return {"%%": "%", "%UNIQUE_ID%": "id", "%START_TIME(%s)%": "1700000000"}[found[0]]

    return re.sub(r"%%|%START_TIME\(%s\)%|%[^%]*%?", operator, text)


def answer(listener: dict[str, Any], path: str, *, stream: bool = False) -> tuple[int, str, str]:
    """Status, content type and body of the first route that matches."""
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        match = route["match"]
        if "safe_regex" in match and not re.fullmatch(match["safe_regex"]["regex"], path):
            continue
        if match.get("headers") and not stream:
            continue
        response = route["direct_response"]
        body = response["body_format"]
        text = body["text_format_source"]["inline_string"]
        return response["status"], body["content_type"], evaluated(text)
    raise AssertionError(path)


@pytest.fixture(scope="module")
def say(rendered: Any) -> Callable[[str], dict[str, Any]]:
    """The listener of the rule with this text."""
    config = rendered("").config

    def build(text: str) -> dict[str, Any]:
        fallback = dataclasses.replace(config.fallback, rule_response=text)
        built = rule.listener(dataclasses.replace(config, fallback=fallback))
        return dict(built.to_dict(casing=lambda name: name.rstrip("_")))

    return build


@settings(max_examples=15)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
@example(text='100 % "quoted" \\ \n %UNIQUE_ID% %REQ(cookie)% "created":-1 模型')
@example(text="data: [DONE]\n\ndata: x")
def test_any_text_arrives_in_json_and_in_a_stream(say: Any, text: str) -> None:
    assume("@ID@" not in text)
    built = say(text)
    status, kind, body = answer(built, CHAT)
    whole = json.loads(body)
    assert (status, kind) == (200, "application/json")
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    status, kind, body = answer(built, CHAT, stream=True)
    assert (status, kind) == (200, "text/event-stream")
    first, done, rest = body.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunk = json.loads(first.removeprefix("data: "))
    assert chunk["choices"][0]["delta"]["content"] == text
    assert chunk["object"] == "chat.completion.chunk"
    assert (whole["id"], whole["created"]) == ("chatcmpl-id", 1700000000)


def test_text_that_holds_the_placeholder_of_the_id_arrives(say: Any) -> None:
    _, _, body = answer(say("see ticket @ID@"), CHAT)
    assert json.loads(body)["choices"][0]["message"]["content"] == "see ticket @ID@"


@settings(max_examples=15)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=30))
@example(text="line\n  and \t\x7f\x85\u2028\ufeff 😀 ")
def test_yaml_keeps_any_text(say: Any, text: str) -> None:
    built = say(text)
    written = yaml.dump(built, Dumper=_Dumper, allow_unicode=True, width=100)
    assert yaml.load(written, Loader=yaml.CSafeLoader) == built


@pytest.mark.parametrize("path", ["/v1/completions", "/api/v1/generate", "/completions?x=1"])
def test_plain_completions_get_text(say: Any, path: str) -> None:
    _, _, body = answer(say("busy"), path)
    assert json.loads(body)["choices"] == [
        {"index": 0, "text": "busy", "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/models", "/", "/v1/chat/completions/x"])
def test_what_no_text_can_answer_is_an_honest_error(say: Any, path: str) -> None:
    status, kind, body = answer(say("busy"), path)
    assert (status, kind) == (503, "application/json")
    assert json.loads(body)["error"]["code"] == "no_upstream_available"
