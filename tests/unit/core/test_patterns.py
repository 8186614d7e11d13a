"""Keywords and expressions against literal expectations; what a prompt cannot do to them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.patterns import PatternError, compile_keywords, compile_pattern


@pytest.mark.parametrize(
    ("keyword", "text", "found"),
    [
        ("sql", "a SQL query", "SQL"),
        ("sql", "sql", "sql"),
        ("sql", "(sql)", "sql"),
        ("sql", "mysql", None),
        ("sql", "sqlite", None),
        ("sql", "sql_x", None),
        ("sql", "用sql写", "sql"),
        ("sql", "mysql and sql", "sql"),
        ("stack trace", "the stack trace says", "stack trace"),
        ("stack trace", "the stack traces say", None),
        ("c++", "in c++20", "c++"),
        ("c++", "in c++", "c++"),
        ("c++", "abc++", None),
        (".net", "asp.net", ".net"),
        (".net", "a .network", None),
        ("编译错误", "帮我修复这个编译错误吧", "编译错误"),
        ("编译错误", "编译 错误", None),
        ("修复bug", "请修复bug吧", "修复bug"),
        ("修复bug", "请修复bugs", None),
        ("a.c", "abc", None),
        ("café", "a CAFÉ", "CAFÉ"),
        ("straße", "STRASSE", None),
    ],
)
def test_keyword_is_found_as_a_whole_word(keyword: str, text: str, found: str | None) -> None:
    assert compile_keywords([keyword]).search(text.encode()) == found


@given(st.lists(st.text(min_size=1), min_size=1), st.text())
def test_any_keyword_may_be_looked_for_in_any_text(keywords: list[str], text: str) -> None:
    pattern = compile_keywords(keywords)
    pattern.search(text.encode())
    assert all(pattern.search(keyword.encode()) is not None for keyword in keywords)


def test_thousands_of_keywords_are_one_expression() -> None:
    pattern = compile_keywords([f"word{n:05}" for n in range(10_000)])
    assert pattern.search(b"a word09999, and more") == "word09999"
    assert pattern.search(b"a word10000") is None


@pytest.mark.parametrize(
    ("expression", "text", "found"),
    [
        (r"^SELECT\b", "SELECT 1", "SELECT"),
        (r"^SELECT\b", "now SELECT", None),
        (r"(?m)^SELECT\b", "now\nSELECT", "SELECT"),
        (r"select", "SELECT", None),
        (r"(?i)select", "SELECT", "SELECT"),
        (r"\p{Han}+", "a 编译 b", "编译"),
        (r"x*", "abc", ""),
        (r".", "é", "é"),
        ("编.", "a编译错误", "编译"),
    ],
)
def test_expression_is_found(expression: str, text: str, found: str | None) -> None:
    assert compile_pattern(expression).search(text.encode()) == found


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("(a", "is no regular expression of RE2: missing ): (a"),
        ("a**", "is no regular expression of RE2: bad repetition operator: **"),
        ("(?=a)", "is no regular expression of RE2: invalid perl operator: (?="),
        (r"(a)\1", r"is no regular expression of RE2: invalid escape sequence: \1"),
        ("a{1001}", "is no regular expression of RE2: invalid repetition size: {1001}"),
        (r"\pL{9}", "takes 10768 steps, over the limit of 1500"),
    ],
)
def test_expression_that_cannot_be_kept_in_bounds_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(PatternError, match=re.escape(problem)):
        compile_pattern(expression)


@pytest.mark.timeout(20)  # a backtracking engine takes longer than the universe has
@pytest.mark.parametrize("expression", [r"(a+)+$", r"(a|a)*c", r"(.*a){20}$", r"(.*){3}x"])
def test_no_text_makes_an_expression_slow(expression: str) -> None:
    assert compile_pattern(expression).search(b"a" * 4098 + b"b") is None
