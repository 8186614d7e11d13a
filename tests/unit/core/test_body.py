"""Bodies against Python's json and a slow scanner of their own: only the model's bytes may change."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from bodies import SCALARS, bodies, members, pairs, write
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.core import errors
from extproc.core.body import (
    PROMPT_EDGE_CHARS,
    BodyError,
    contents,
    parse,
    prompt_text,
    text_chars,
    with_model,
)


def refuse_constant(text: str) -> None:
    raise ValueError(text)


def expected_kind(raw: bytes) -> errors.ErrorKind | None:
    """What is wrong with UTF-8 text as a request body; None: nothing."""
    if not raw.strip():
        return errors.EMPTY_BODY
    try:
        value = json.loads(raw.decode(), parse_constant=refuse_constant, parse_int=str)
    except ValueError:
        return errors.INVALID_JSON
    if not isinstance(value, dict):
        return errors.NOT_AN_OBJECT
    if sum(key == "model" for key, _, _ in members(raw)) > 1:
        return errors.DUPLICATE_MODEL
    if not isinstance(value.get("messages", []), list):
        return errors.INVALID_MESSAGES
    model = value.get("model")
    number = any(
        key == "model" and raw[start : start + 1] not in b'"n' for key, start, _ in members(raw)
    )
    if number or not (model is None or (isinstance(model, str) and model)):
        return errors.INVALID_MODEL
    return None


def kind_of(raw: bytes) -> errors.ErrorKind | None:
    try:
        body = parse(raw)
        prompt_text(body)
    except BodyError as error:
        return error.kind
    return None


# --- the model, replaced in place ------------------------------------------------------------------


@settings(max_examples=200)
@given(bodies())
@example(b'{"a":12,"a":1,"model":"x"}')
@example(b'{"a":1,"a":12,"model":"x"}')
@example(b'{"\\u006dodel":"x"}')
@example(b'{"mode\\u006C":null,"tools":[{"model":"auto"}]}')
@example(b'{"messages":[{"model":"auto"}]}')
@example(b"{ }")
@example(b'{"a":{"model":1},"model":"x","b":{"model":1}}')
@example(b'{"\\\\u006dodel":1,"model":"x"}')
@example(b'{"x":"\\\\ud83d\\udc00","model":"x"}')
def test_rewrite_changes_the_bytes_of_the_model_value_and_no_other(raw: bytes) -> None:
    if (expected := expected_kind(raw)) is not None:
        with pytest.raises(BodyError) as refused:
            parse(raw)
        assert refused.value.kind is expected
        return
    body = parse(raw)
    rewritten = with_model(body, 'new"模型')
    value = '"new\\"模型"'.encode()
    at = rewritten.offset
    assert rewritten.raw[at : at + rewritten.length] == value
    spans = [(start, end) for key, start, end in members(raw) if key == "model"]
    if spans:
        ((start, end),) = spans
        assert rewritten.raw == raw[:start] + value + raw[end:]
    else:
        comma = b"," if members(raw) else b""
        inserted = b'"model":' + value + comma
        before = at - len(b'"model":')
        assert rewritten.raw == raw[:before] + inserted + raw[before:]
        assert pairs(rewritten.raw) == [("model", 'new"模型'), *pairs(raw)]


@settings(max_examples=150)
@given(bodies())
def test_model_and_stream_are_read_as_python_reads_them(raw: bytes) -> None:
    if expected_kind(raw) is not None:
        return
    body, value = parse(raw), json.loads(raw, parse_int=str)
    if "\\ud" not in raw.decode().lower():
        assert body.model == value.get("model")
    assert body.has_model_member == ("model" in value)
    assert body.stream is (value.get("stream") is True)


@pytest.mark.parametrize(
    ("text", "stream"),
    [("true", True), ("false", False), ('"true"', False), ("1", False), ("null", False)],
)
def test_only_true_streams(text: str, stream: bool) -> None:
    assert parse(f'{{"stream": {text} }}'.encode()).stream is stream


def test_last_of_duplicate_stream_members_counts() -> None:
    assert parse(b'{"stream":false,"stream":true}').stream


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","x":1,"mod\\u0065l":"a"}',
        b'{"\\u006d\\u006f\\u0064\\u0065\\u006c":null , "model" : "a"}',
        b'{"model":{"model":1},"model":"a"}',
        b'{"model":"a","model":null}',
    ],
)
def test_two_top_level_models_are_refused(raw: bytes) -> None:
    assert kind_of(raw) is errors.DUPLICATE_MODEL


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", errors.EMPTY_BODY),
        (b" \n", errors.EMPTY_BODY),
        (b"[]", errors.NOT_AN_OBJECT),
        (b"null", errors.NOT_AN_OBJECT),
        (b'"auto"', errors.NOT_AN_OBJECT),
        (b"\xef\xbb\xbf{}", errors.INVALID_JSON),
        ('{"model":"auto"}'.encode("utf-16"), errors.INVALID_JSON),
        (b'{"a":NaN}', errors.INVALID_JSON),
        (b'{"a":-Infinity}', errors.INVALID_JSON),
        (b'{"a":1,}', errors.INVALID_JSON),
        (b"{'model':'auto'}", errors.INVALID_JSON),
        (b'{"a":"\n"}', errors.INVALID_JSON),
        (b'{"a":"\\x"}', errors.INVALID_JSON),
        (b'{"a":01}', errors.INVALID_JSON),
        (b'{"model":"auto"}{}', errors.INVALID_JSON),
        (b'{"model":"\xff"}', errors.INVALID_MODEL),
        (b'{"model":""}', errors.INVALID_MODEL),
        (b'{"model":["auto"]}', errors.INVALID_MODEL),
        (b'{"messages":"hi"}', errors.INVALID_MESSAGES),
        (b'{"messages":null}', errors.INVALID_MESSAGES),
        (b'{"messages":["hi"]}', errors.INVALID_MESSAGES),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', errors.INVALID_JSON),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", errors.TOO_DEEP),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, errors.TOO_DEEP),
        (b'{"a":' + b"[" * 200_000, errors.TOO_DEEP),
    ],
)
def test_bad_body_is_refused_for_what_is_wrong_with_it(raw: bytes, kind: errors.ErrorKind) -> None:
    assert kind_of(raw) is kind


def test_no_depth_of_nesting_gives_anything_but_an_answer_or_a_refusal() -> None:
    for shape in (b'{"messages":[{"role":"user","content":[%b]}]}', b'{"input":[%b],"model":"a"}'):
        kinds = {kind_of(shape % (b"[" * depth + b"]" * depth)) for depth in range(500, 1200)}
        assert kinds <= {None, errors.TOO_DEEP}


@settings(max_examples=300)
@given(
    st.binary(max_size=40) | st.text(st.sampled_from('{}[]":,\\ un1e-.\ud800"model"'), max_size=25)
)
def test_anything_that_is_no_body_is_refused_as_python_would(noise: bytes | str) -> None:
    raw = noise if isinstance(noise, bytes) else noise.encode("utf-8", "surrogatepass")
    found = kind_of(raw)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    try:
        expected = expected_kind(raw)
    except RecursionError:
        return
    if expected in (errors.NOT_AN_OBJECT, errors.INVALID_JSON):
        # Where something else than an object begins, it is refused without being read to its end.
        assert found in (errors.NOT_AN_OBJECT, errors.INVALID_JSON)
    elif expected is not None or found is not errors.INVALID_MESSAGES:
        assert found is expected


@settings(max_examples=100)
@given(bodies(), st.integers(0, 255), st.randoms(use_true_random=False))
def test_one_wrong_byte_never_gives_another_exception(
    raw: bytes, byte: int, dice: random.Random
) -> None:
    at = dice.randrange(len(raw))
    kind_of(raw[:at] + bytes([byte]) + raw[at + 1 :])


def test_body_torn_anywhere_is_refused() -> None:
    raw = '{"model": "auto", "n": [1.5e3, {"模": "\\ud83d\\ude00\\"x"}], "stream": true}'.encode()
    assert kind_of(raw) is None
    for end in range(1, len(raw)):
        assert kind_of(raw[:end]) is errors.INVALID_JSON, raw[:end]


def test_five_megabytes_keep_every_other_byte() -> None:
    filler = '{"model":"auto","n":9007199254740993,"s":"\\u0061\\/模"},'.encode() * 100_000
    head, tail = b'{"tools":[' + filler + b'1],"model" : ', b' ,"tools":[]}'
    rewritten = with_model(parse(head + b'"auto"' + tail), "m")
    assert rewritten.raw == head + b'"m"' + tail


# --- the text to route by -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "a"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "a",
        ),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "b"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": []}]}, "a"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": None}]}, "a"),
        ({"messages": [{"role": "user"}]}, ""),
        ({"messages": [{"role": "system", "content": "a"}]}, ""),
        ({"messages": []}, ""),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what is"},
                            {"type": "image_url", "image_url": {"url": "data:"}},
                            {"type": "text", "text": "this?"},
                        ],
                    }
                ]
            },
            "what is\n\nthis?",
        ),
        ({"messages": [{"role": "user", "content": [{"text": 5}, 5, None, "a", ["b"]]}]}, "a"),
        ({"messages": [{"role": ["\\"], "content": "a"}, {"role": 5, "content": "b"}]}, ""),
        ({"messages": [{"role": "user", "content": {"text": "a"}}]}, ""),
        ({"messages": [{"role": "user", "content": "a", "n": 1e300}]}, "a"),
        ({"prompt": "a"}, "a"),
        ({"prompt": ["a", "b"]}, "a\n\nb"),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": [1, 2]}, ""),
        ({"prompt": 5}, ""),
        ({"prompt": {}}, ""),
        ({"prompt": None, "input": "a"}, "a"),
        ({"input": "a"}, "a"),
        ({"input": ["a", "b"]}, "a\n\nb"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "a"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, "a"),
        (
            {"input": [{"type": "message", "role": "user", "content": "a"}, {"type": "reasoning"}]},
            "a",
        ),
        ({"input": [{"role": "assistant", "content": "b"}]}, ""),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "b"),
        ({"input": [{"content": "a"}]}, "a"),
        ({"input": [{"type": "input_text", "text": "a"}]}, "a"),
        ({}, ""),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "a"),
    ],
)
def test_prompt_text_is_what_the_user_said_last(body: dict[str, Any], text: str) -> None:
    assert prompt_text(parse(json.dumps(body).encode())) == text


def test_role_and_text_may_be_written_in_escapes() -> None:
    assert (
        prompt_text(parse(b'{"messages":[{"r\\u006fle":"us\\u0065r","content":"\\u4f60"}]}'))
        == "你"
    )


def test_a_number_too_large_for_a_float_beside_the_text_is_nobodys_business() -> None:
    assert kind_of(b'{"messages":[{"role":"user","content":"a","n":1e999}]}') is None


def test_long_prompt_keeps_both_ends_and_a_paragraph_break() -> None:
    text = "始" * 5000 + "end" * 2000
    found = prompt_text(parse(json.dumps({"prompt": text}).encode()))
    assert found == text[:PROMPT_EDGE_CHARS] + "\n\n" + text[-PROMPT_EDGE_CHARS:]
    assert prompt_text(parse(json.dumps({"prompt": text[:4096]}).encode())) == text[:4096]


def test_of_very_many_parts_the_first_and_the_last_are_read() -> None:
    parts = ["first", *([{"type": "image_url"}] * 5000), {"type": "text", "text": "last"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert prompt_text(parse(json.dumps(body).encode())) == "first\n\nlast"


def test_question_stands_before_very_many_tool_messages() -> None:
    messages = [{"role": "user", "content": "a"}, *([{"role": "tool", "content": "b"}] * 5000)]
    assert prompt_text(parse(json.dumps({"messages": messages}).encode())) == "a"


ODD = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(
            st.tuples(st.sampled_from(["role", "content", "text", "x"]), inner), max_size=4
        ).map(tuple)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.sampled_from(["messages", "prompt", "input"]), ODD, st.integers(0, 2**32))
def test_odd_types_are_passed_over_or_refused(key: str, value: Any, seed: int) -> None:
    raw = write(((key, value),), random.Random(seed)).encode()
    kind = kind_of(raw)
    assert kind is None or (kind is errors.INVALID_MESSAGES and key == "messages")


# --- what else a body holds -----------------------------------------------------------------------

PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("body", "held"),
    [
        ({"messages": [user({"type": "text", "text": "a"}, PART)]}, {"images"}),
        ({"messages": [user(PART), {"role": "user", "content": "a"}]}, {"images"}),
        ({"input": [user({"type": "input_image", "image_url": "u"})]}, {"images"}),
        ({"messages": [user({"type": "image", "source": {"type": "url"}})]}, {"images"}),
        (
            {"messages": [user({"type": "tool_result", "content": [{"type": "image"}]})]},
            {"images"},
        ),
        ({"prompt": "a", "images": ["AAAA"]}, {"images"}),
        ({"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, {"images"}),
        ({"prompt": "a", "images": []}, set()),
        ({"messages": [{"role": "user", "content": "a", "images": []}]}, set()),
        ({"messages": [{"role": "user", "content": 'say "type": "image_url"'}]}, set()),
        ({"messages": [{"role": "user", "content": "an image"}]}, set()),
        ({"messages": [user({"type": "image_generation_call"})]}, set()),
        ({"messages": [], "metadata": {"type": "image"}}, set()),
        ({"prompt": "a", "tools": [FUNCTION]}, {"tools"}),
        ({"prompt": "a", "functions": [{"name": "f"}]}, {"tools"}),
        ({"prompt": "a", "tools": [FUNCTION], "images": ["A"]}, {"tools", "images"}),
        ({"prompt": "a", "tools": [], "functions": None}, set()),
        ({"prompt": "a", "tools": {}, "functions": "f", "images": 5}, set()),
        ({}, set()),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_images_and_tools_are_seen_wherever_they_stand(
    body: dict[str, Any], held: set[str], indent: int | None
) -> None:
    assert contents(parse(json.dumps(body, indent=indent).encode())) == held


@pytest.mark.parametrize(
    ("body", "chars"),
    [
        ({"messages": [{"role": "system", "content": "abc"}, user("de", PART)]}, 5),
        ({"messages": [user({"type": "text", "text": "ab"}, {"type": "text", "text": "c"})]}, 3),
        ({"messages": [{"role": "user", "content": "编译\n"}, {"role": "assistant"}]}, 3),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "bcd"}, 1),
        ({"prompt": "abcd"}, 4),
        ({"prompt": ["ab", "cd"]}, 4),
        ({"prompt": [1, 2, 3]}, 0),
        ({"input": [user({"type": "input_text", "text": "ab"}), "c"]}, 3),
        ({"input": [{"role": "assistant", "content": "ab"}, {"type": "reasoning"}]}, 2),
        ({"messages": []}, 0),
        ({}, 0),
    ],
)
def test_text_is_counted_in_every_message(body: dict[str, Any], chars: int) -> None:
    assert text_chars(parse(json.dumps(body).encode()), enough=10_000) == chars


def test_counting_ends_where_it_is_enough() -> None:
    body = {"messages": [{"role": "user", "content": "abc"}] * 100}
    assert text_chars(parse(json.dumps(body).encode()), enough=100) == 102


def test_of_very_many_messages_the_newest_are_counted() -> None:
    old, new = {"role": "user", "content": "old"}, {"role": "user", "content": "n"}
    body = {"messages": [old, *([new] * 5000)]}
    assert text_chars(parse(json.dumps(body).encode()), enough=10_000) == 4096


def test_older_message_that_is_no_text_is_found_out_by_counting() -> None:
    body = parse(b'{"messages":[{"content":"\xff"},{"role":"user","content":"a"}]}')
    assert prompt_text(body) == "a"
    with pytest.raises(BodyError) as caught:
        text_chars(body, enough=10)
    assert caught.value.kind is errors.INVALID_JSON


@settings(max_examples=200)
@given(st.sampled_from(["messages", "prompt", "input", "tools", "images"]), ODD, st.integers(0, 99))
def test_odd_types_hold_and_count_what_they_may(key: str, value: Any, seed: int) -> None:
    raw = write(((key, value),), random.Random(seed)).encode()
    if kind_of(raw) is None:
        body = parse(raw)
        contents(body)
        assert text_chars(body, enough=100) >= 0
