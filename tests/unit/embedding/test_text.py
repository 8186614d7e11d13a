"""What of a long prompt is read."""

from __future__ import annotations

import pytest

from extproc.embedding.text import END_CHARS, MAX_CHARS, bound, lines, paragraphs


def test_text_up_to_the_limit_is_untouched():
    text = "x" * MAX_CHARS
    assert bound(text) is text


def test_long_text_keeps_both_ends_as_paragraphs():
    text = bound("a" * 500_000 + "b" * 500_000)
    assert text == f"{'a' * END_CHARS}\n\n{'b' * END_CHARS}"


def test_bounding_twice_changes_nothing():
    once = bound("word " * 100_000)
    assert bound(once) == once


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one\n\ntwo\nmore\n\nthree", ["one", "two\nmore", "three"]),
        ("one\n \t\ntwo", ["one", "two"]),
        ("one\r\n\r\ntwo", ["one\r", "two"]),
        ("问题\n\n材料", ["问题", "材料"]),
        ("```\n\none\n\n---\n", ["one"]),
        ("}\n\n---", ["}\n\n---"]),
        ("", [""]),
    ],
)
def test_paragraphs_are_those_with_words(text, parts):
    assert paragraphs(text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [("```\none\n\ntwo\n```", ["one", "two"]), ("one", ["one"]), ("\n\n", ["\n\n"])],
)
def test_lines_are_those_with_words(text, parts):
    assert lines(text) == parts
