"""What of a text is sent, what it costs, and how texts are put together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from extproc.embedding.batch import Budget, Filling, Work, batches, work_of
from extproc.embedding.model import default_tokenizer
from extproc.embedding.text import END_TOKENS, MAX_TOKENS

PROMPTS = Path(__file__).parents[2] / "data" / "prompts"
FILLER = "The quick brown fox jumps over the lazy dog. " * 60
WORKS = st.lists(
    st.builds(
        Work,
        st.lists(st.just("x"), min_size=1, max_size=2).map(tuple),
        st.integers(1, 300),
    )
)


def test_short_text_is_sent_as_it_is():
    assert work_of("hello there").inputs == ("hello there",)
    assert work_of("帮我修复这个编译错误").inputs == ("帮我修复这个编译错误",)


@pytest.mark.parametrize("text", ["", " ", "\n \t", "\u3000"])
def test_blank_text_is_sent_as_something_that_services_take(text):
    assert work_of(text).inputs == ("?",)


def test_lone_surrogate_can_be_sent():
    (sent,) = work_of("a\ud800b").inputs
    assert json.loads(json.dumps(sent).encode()) == "a?b"


def test_long_text_is_its_first_and_last_paragraph():
    question = "Write a function that reverses a list."
    assert work_of(f"{question}\n\n{FILLER}\n\nThanks!").inputs == (question, "Thanks!")


def test_question_on_a_line_of_its_own_is_found():
    log = "connection reset by peer\n" * 300
    assert work_of(f"why?\n{log}").inputs[0] == "why?"
    assert work_of(f"{log}why?\n```\n").inputs[1] == "why?"


def test_long_paragraph_gives_its_own_two_ends():
    head, tail = work_of("a" * 2000 + "b" * 2000).inputs
    assert set(head) == {"a"}
    assert set(tail) == {"b"}
    assert len(head) == len(tail) == 4 * (END_TOKENS - 2)


def test_chinese_is_cut_sooner_than_english():
    head, tail = work_of("你" * 500).inputs
    assert len(head) == len(tail) == END_TOKENS - 2


@given(st.text() | st.integers(0, 5000).map(lambda size: "你 a" * size))
def test_any_text_costs_no_more_than_its_vectors_may(text):
    work = work_of(text)
    assert all(each and not each.isspace() for each in work.inputs)
    assert "".join(work.inputs).encode()
    assert 1 <= work.tokens <= max(MAX_TOKENS, 2 * END_TOKENS) + 1


@pytest.mark.parametrize("name", ["kinds_en", "clinc_domains_test", "belle_zh", "mtbench_en"])
def test_estimate_is_near_what_a_tokeniser_counts(name):
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(default_tokenizer()))
    lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines if len(text := json.loads(line)["text"]) < 200]
    real = sum(len(tokenizer.encode(text)) + 2 for text in texts)
    assert 0.9 < sum(work_of(text).tokens for text in texts) / real < 1.3


@given(WORKS, st.integers(1, 400), st.integers(1, 5))
def test_batches_hold_all_in_order_and_are_over_budget_for_one_text_alone(works, tokens, inputs):
    made = list(batches(works, Budget(tokens, inputs)))
    assert [work for batch in made for work in batch] == works
    assert all(made)
    for batch in made:
        assert len(batch) == 1 or (
            sum(work.tokens for work in batch) <= tokens
            and sum(len(work.inputs) for work in batch) <= inputs
        )
    for batch, following in itertools.pairwise(made):
        filling = Filling(Budget(tokens, inputs))
        for work in batch:
            filling.add(work)
        assert not filling.fits(following[0]), "no room is left unused"
