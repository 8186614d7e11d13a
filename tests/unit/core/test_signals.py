"""Rules one by one, and which of several decides, against literal expectations."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from extproc.core.errors import Content, RouteReason
from extproc.core.routing import RouteRule
from extproc.core.signals import Facts, SignalTable

IMAGES, TOOLS = Content.IMAGES, Content.TOOLS


def decided(
    rules: list[RouteRule], text: str = "", **facts: Any
) -> tuple[str, str, str | None] | None:
    decision = SignalTable(rules).decide(Facts(text.encode(), **facts))
    return decision and (decision.route, decision.reason.value, decision.matched)


# --- one rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "matched"),
    [
        ({"x-team": "data"}, "x-team = data"),
        ({"x-team": "Data"}, None),
        ({"x-team": "data2"}, None),
        ({"x-team": ""}, None),
        ({"x-tier": "gold"}, "x-tier = *"),
        ({"x-tier": ""}, "x-tier = *"),
        ({"x-tier": "gold", "x-team": "data"}, "x-team = data"),
        ({"x-other": "data"}, None),
        ({}, None),
    ],
)
def test_header_equals_or_is_there(sent: dict[str, str], matched: str | None) -> None:
    rule = RouteRule("r", headers=(("x-team", "data"), ("x-tier", "*")))
    assert decided([rule], headers=sent) == (matched and ("r", "header", matched))


@pytest.mark.parametrize(
    ("wanted", "held", "matched"),
    [
        ((IMAGES,), {IMAGES}, "images"),
        ((IMAGES,), {TOOLS}, None),
        ((TOOLS, IMAGES), {IMAGES}, "images"),
        ((IMAGES, TOOLS), {IMAGES, TOOLS}, "images"),
        ((IMAGES,), set(), None),
    ],
)
def test_content_is_held(
    wanted: tuple[Content, ...], held: set[Content], matched: str | None
) -> None:
    found = decided([RouteRule("r", has=wanted)], holds=frozenset(held))
    assert found == (matched and ("r", "content", matched))


@pytest.mark.parametrize(
    ("least", "most", "fitting", "unfitting"),
    [
        (10, None, (10, 11, 9999), (0, 1, 9)),
        (None, 10, (1, 9, 10), (0, 11)),
        (5, 10, (5, 10), (0, 4, 11)),
        (5, 5, (5,), (4, 6)),
    ],
)
def test_length_is_between_its_limits_and_a_prompt_without_text_has_none(
    least: int | None, most: int | None, fitting: tuple[int, ...], unfitting: tuple[int, ...]
) -> None:
    rule = RouteRule("r", min_chars=least, max_chars=most)
    assert all(decided([rule], chars=chars) for chars in fitting)
    assert not any(decided([rule], chars=chars) for chars in unfitting)


def test_length_that_matched_is_named_by_its_limits() -> None:
    assert decided([RouteRule("r", min_chars=2)], chars=3) == ("r", "length", "min_chars = 2")
    assert decided([RouteRule("r", min_chars=2, max_chars=4)], chars=3) == (
        "r",
        "length",
        "min_chars = 2, max_chars = 4",
    )


def test_keyword_names_the_word_and_pattern_the_expression() -> None:
    assert decided([RouteRule("r", keywords=("sql",))], "a SQL") == ("r", "keyword", "SQL")
    rule = RouteRule("r", patterns=("^b", "^a"))
    assert decided([rule], "ab") == ("r", "pattern", "^a")
    assert decided([rule], "cab") is None


def test_expression_that_matches_nothing_at_all_still_matches() -> None:
    assert decided([RouteRule("r", patterns=("x*",))]) == ("r", "pattern", "x*")


@pytest.mark.parametrize("rules", [[], [RouteRule("r")], [RouteRule("r", utterances=("a",))]])
def test_without_rules_nothing_is_asked(rules: list[RouteRule]) -> None:
    table = SignalTable(rules)
    assert table.is_empty
    assert (table.headers, table.looks_inside, table.enough_chars) == (frozenset(), False, 0)
    assert table.decide(Facts(b"anything")) is None


def test_table_says_what_it_needs_to_know() -> None:
    table = SignalTable(
        [
            RouteRule("a", headers=(("x-team", "data"), ("x-tier", "*")), max_chars=10),
            RouteRule("b", headers=(("x-team", "ml"),), has=(TOOLS,), min_chars=300),
        ]
    )
    assert table.headers == {"x-team", "x-tier"}
    assert table.looks_inside
    assert table.enough_chars == 301


# --- several --------------------------------------------------------------------------------------

ALL = (
    RouteRule("by-header", headers=(("x-team", "data"),)),
    RouteRule("by-content", has=(TOOLS,)),
    RouteRule("by-keyword", keywords=("sql",)),
)
EVERYTHING: dict[str, Any] = {
    "text": "sql",
    "headers": {"x-team": "data"},
    "holds": frozenset({TOOLS}),
    "chars": 3,
}


@pytest.mark.parametrize("order", list(permutations(ALL)))
def test_among_equals_header_comes_before_content_before_keyword(
    order: tuple[RouteRule, ...],
) -> None:
    checked = SignalTable(list(order)).check(Facts(b"sql"))
    assert [each.route for each in checked] == ["by-header", "by-content", "by-keyword"]
    assert decided(list(order), **EVERYTHING) == ("by-header", "header", "x-team = data")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RouteRule("a", has=(TOOLS,)), RouteRule("b", max_chars=9)),
        (RouteRule("a", keywords=("sql",)), RouteRule("b", patterns=("sql",))),
        (RouteRule("a", keywords=("s", "sql")), RouteRule("b", keywords=("sql",))),
    ],
)
def test_among_equals_of_one_rank_the_file_decides(one: RouteRule, other: RouteRule) -> None:
    for order in ([one, other], [other, one]):
        found = decided(order, **EVERYTHING)
        assert found is not None
        assert found[0] == order[0].name


def test_higher_priority_comes_before_any_kind() -> None:
    low, high = ALL[0], RouteRule("high", patterns=("q",), priority=1)
    assert decided([low, high], **EVERYTHING) == ("high", "pattern", "q")


def test_first_keyword_of_the_text_does_not_matter() -> None:
    rules = [RouteRule("one", keywords=("alpha",)), RouteRule("two", keywords=("beta",))]
    assert decided(rules, "beta before alpha") == ("one", "keyword", "alpha")


def test_any_signal_of_a_route_admits() -> None:
    rule = RouteRule(
        "r",
        keywords=("sql",),
        patterns=("^q",),
        headers=(("x-team", "data"),),
        has=(IMAGES,),
        min_chars=100,
    )
    assert decided([rule], "my sql") == ("r", "keyword", "sql")
    assert decided([rule], "q") == ("r", "pattern", "^q")
    assert decided([rule], headers={"x-team": "data"}) == ("r", "header", "x-team = data")
    assert decided([rule], holds=frozenset({IMAGES})) == ("r", "content", "images")
    assert decided([rule], chars=100) == ("r", "length", "min_chars = 100")
    assert decided([rule], "nothing") is None


def test_every_signal_is_shown_in_order_also_behind_the_one_that_decides() -> None:
    rules = [
        RouteRule("a", keywords=("sql",), patterns=("z",)),
        RouteRule("b", utterances=("x",), min_chars=2, priority=7),
    ]
    shown = SignalTable(rules).check(Facts(b"sql", chars=3))
    assert [(each.route, each.reason, each.priority, each.matched) for each in shown] == [
        ("b", RouteReason.LENGTH, 7, "min_chars = 2"),
        ("a", RouteReason.KEYWORD, 0, "sql"),
        ("a", RouteReason.PATTERN, 0, None),
    ]
