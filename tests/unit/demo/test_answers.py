"""What scripted upstreams say."""

import json

import pytest

from extproc.demo.answers import (
    PIECES,
    Ask,
    Endpoint,
    answer_text,
    bad_answer,
    endpoint_of,
    in_pieces,
    json_answer,
    parse_ask,
    stream_answer,
)
from extproc.demo.faults import BadSchema


def ask(endpoint=Endpoint.CHAT, **body):
    return parse_ask(endpoint, json.dumps(body).encode())


def user(text):
    return [{"role": "user", "content": text}]


def events(stream):
    return [
        part.removeprefix(b"data: ").removesuffix(b"\n\n")
        for part in (*stream.head, *stream.content, *stream.tail)
    ]


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/v1/chat/completions", Endpoint.CHAT),
        ("/openai/v1/chat/completions", Endpoint.CHAT),
        ("/v1/completions", Endpoint.COMPLETION),
        ("/api/v1/generate", Endpoint.GENERATE),
        ("/generate", Endpoint.GENERATE),
        ("/v1/embeddings", Endpoint.EMBEDDINGS),
        ("/v1/models", None),
        ("/chat/completions", None),
    ],
)
def test_endpoint_is_told_by_the_end_of_the_path(path, endpoint):
    assert endpoint_of(path) is endpoint


def test_answer_says_who_as_which_model_to_what():
    asked = ask(model="m", messages=[*user("first"), *user("last\nquestion")])
    assert answer_text("coder", asked) == "coder here, asked as model m: last question"


def test_long_questions_are_echoed_by_their_start():
    asked = ask(model="m", messages=user("长" * 5000))
    assert answer_text("coder", asked).endswith("长" * 60 + "…")


def test_content_parts_are_read_as_text():
    content = [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "what is this"}]
    assert ask(model="m", messages=user(content)).text == "what is this"


def test_a_lone_surrogate_is_answered():
    asked = parse_ask(
        Endpoint.CHAT, rb'{"model":"m\udc00","messages":[{"role":"user","content":"\ud800"}]}'
    )
    assert json.loads(json_answer(asked, answer_text("x", asked), serial=1, created_s=1))


def test_generate_answers_text():
    asked = ask(Endpoint.GENERATE, prompt="say hi", max_tokens=5)
    text = answer_text("general", asked)
    assert json.loads(json_answer(asked, text, serial=1, created_s=1))["text"] == (
        "general here, asked without a model: say hi"
    )


def test_embeddings_answer_one_vector_per_input_the_same_each_time():
    asked = ask(Endpoint.EMBEDDINGS, model="e", input=["a", "b"])
    first = json.loads(json_answer(asked, "", serial=1, created_s=1))
    assert [item["index"] for item in first["data"]] == [0, 1]
    assert first["data"][0]["embedding"] != first["data"][1]["embedding"]
    assert json.loads(json_answer(asked, "", serial=2, created_s=2))["data"] == first["data"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "could not parse"),
        (b"{", "could not parse"),
        (b"[" * 100_000, "could not parse"),
        (b"[1]", "must be an object"),
        (b'{"model":"m","messages":"hi"}', "'messages' must be a list"),
    ],
)
def test_bad_bodies_are_refused(body, says):
    with pytest.raises(ValueError, match=says):
        parse_ask(Endpoint.CHAT, body)


def test_stream_says_what_the_json_answer_says():
    asked = ask(model="m", messages=user("hello"), stream=True)
    text = answer_text("coder", asked)
    *chunks, done = events(stream_answer(asked, text, serial=7, created_s=1))
    assert done == b"[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_usage_comes_last_and_only_when_asked_for():
    asked = ask(model="m", messages=user("hi"), stream=True, stream_options={"include_usage": True})
    *chunks, usage, _ = events(stream_answer(asked, "t", serial=1, created_s=1))
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["total_tokens"] > 0
    plain = ask(model="m", messages=user("hi"), stream=True)
    assert not any(b"usage" in e for e in events(stream_answer(plain, "t", serial=1, created_s=1)))


def test_completion_stream_carries_text():
    asked = ask(Endpoint.COMPLETION, model="m", prompt="hi", stream=True)
    *chunks, _ = events(stream_answer(asked, "some text", serial=1, created_s=1))
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "some text"


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_pieces_join_to_the_whole(length):
    whole = "x" * length
    pieces = in_pieces(whole)
    assert "".join(pieces) == whole
    assert len(pieces) == min(PIECES, length)
    assert all(pieces)


@pytest.mark.parametrize("variant", BadSchema)
def test_bad_answers_have_no_choice_to_offer(variant):
    asked = Ask(Endpoint.CHAT, "m", "hi")
    content_type, body = bad_answer(variant, json_answer(asked, "t", serial=1, created_s=1))
    if content_type != "application/json" or variant is BadSchema.TORN_JSON:
        with pytest.raises(ValueError):
            json.loads(body)
    else:
        assert not json.loads(body).get("choices")
