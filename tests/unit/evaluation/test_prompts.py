"""JSONL into prompts: every fault is named at once, with its line and how to mend it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.evaluation.prompts import DataError, Prompt, parse_prompts, printable, sample

ROUTES = ("code", "math", "chat")


def parse(*lines, routes=ROUTES):
    raw = [line if isinstance(line, bytes) else line.encode() for line in lines]
    return parse_prompts(raw, file="x.jsonl", routes=routes)


def faults(*lines, routes=ROUTES):
    with pytest.raises(DataError) as raised:
        parse(*lines, routes=routes)
    return str(raised.value).split("\n")


def test_route_null_belongs_nowhere_and_other_members_are_ignored():
    prompts = parse(
        '{"text": "写一个函数", "route": "code", "id": 7}\n', '{"text": "b", "route": null}'
    )
    assert prompts == (Prompt("写一个函数", "code"), Prompt("b", None))


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_no_faults():
    mark = b"\xef\xbb\xbf"
    assert len(parse(mark + b'{"text": "a", "route": null}\r', b"\r", b"", b"   ")) == 1


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"nope", "not valid JSON"),
        (b'{"text": "a"', "not valid JSON"),
        (b'{"text": "\xff", "route": null}', "not valid JSON"),
        (b'{"text": "\\ud800", "route": null}', "not valid JSON"),
        (b"[" * 5000, "not valid JSON"),
        (b'["a"]', "not an object"),
        (b'{"route": "code"}', '"text" is missing'),
        (b'{"text": 1, "route": "code"}', '"text" is not a string with a word'),
        (b'{"text": " \\n", "route": "code"}', '"text" is not a string with a word'),
        (b'{"text": "a"}', '"route" is missing; write the name of a route, or null'),
        (b'{"text": "a", "route": 1}', '"route" is neither a string nor null'),
    ],
)
def test_bad_line_is_named_with_its_number(line, fault):
    (text,) = faults(b'{"text": "a", "route": null}', line)
    assert text.startswith(f"x.jsonl:2: {fault}")


def test_every_bad_line_is_named_at_once_in_order():
    lines = faults("{}", '{"text": "a", "route": "cod"}', "nope")
    assert [line.split(":")[1] for line in lines] == ["1", "2", "3"]


def test_unknown_route_is_named_once_with_the_nearest_known():
    stranger = '{"text": "a", "route": "cod"}'
    (text,) = faults(stranger, '{"text": "a", "route": "code"}', stranger, stranger)
    assert text == (
        'x.jsonl:1: there is no route "cod", also on 2 more lines, to line 4; did you mean "code"?'
    )


def test_unknown_route_that_is_like_none_lists_them_all():
    assert faults('{"text": "a", "route": "zzz"}')[0].endswith("there are code, math, chat")


def test_fault_never_passes_on_a_terminal_escape():
    (text,) = faults(json.dumps({"text": "a", "route": "\x1b[2J\u202e"}))
    assert text.isprintable()


def test_file_without_prompts_is_a_fault():
    assert faults("", "\n")[0].startswith("x.jsonl:1: there is no prompt")


@given(st.text())
def test_printable_text_is_one_line_and_obeyed_by_nothing(text):
    shown = printable(text)
    assert shown.replace("\N{ZERO WIDTH JOINER}", "").isprintable()
    assert len(shown) == len(text)


def test_sample_is_spread_over_the_file_keeps_its_order_and_repeats():
    prompts = tuple(Prompt(str(number), None) for number in range(1000))
    chosen = sample(prompts, 100)
    assert len(chosen) == 100
    assert list(chosen) == sorted(chosen, key=lambda prompt: int(prompt.text))
    assert 35 <= sum(int(prompt.text) < 500 for prompt in chosen) <= 65
    assert sample(prompts, 100) == chosen


@pytest.mark.parametrize("limit", [None, 3, 4])
def test_sample_is_all_where_the_limit_is_no_limit(limit):
    prompts = (Prompt("a", None), Prompt("b", None), Prompt("c", None))
    assert sample(prompts, limit) == prompts
