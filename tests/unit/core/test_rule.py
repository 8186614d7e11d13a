"""The rule answer, in the shape that a path and a client ask for."""

import json

import pytest

from extproc.core import rule


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "chat.completion"),
        ("/openai/v1/chat/completions/?user=x", "chat.completion"),
        ("/v1/completions", "text_completion"),
        ("/generate", "text_completion"),
    ],
)
def test_answer_has_the_shape_of_its_path(path, kind):
    content_type, body = rule.answer(path, 'busy, "sorry"', stream=False, id_="1", created=7)
    answer = json.loads(body)
    assert content_type == "application/json"
    assert (answer["object"], answer["created"], answer["model"]) == (kind, 7, "pointsman-rule")
    choice = answer["choices"][0]
    assert choice.get("text", choice.get("message", {}).get("content")) == 'busy, "sorry"'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stream_is_one_chunk_and_done(path):
    content_type, body = rule.answer(path, "busy", stream=True, id_="1", created=7)
    first, done, rest = body.decode().split("\n\n")
    assert content_type == "text/event-stream"
    assert json.loads(first.removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
    assert (done, rest) == ("data: [DONE]", "")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/", "/v1/models"])
def test_no_canned_text_passes_for_anything_else(path):
    assert rule.answer(path, "busy", stream=False, id_="1", created=7) is None
