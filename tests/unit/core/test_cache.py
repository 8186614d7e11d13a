"""The decision cache: exact, bounded, and blind to decisions of other routes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.cache import DecisionCache, routes_version
from extproc.core.routing import RouteRule, RouteScore

SCORES = (RouteScore("code", 0.5, 0.3),)
RULES = (RouteRule("code", utterances=("a", "b")), RouteRule("chat", utterances=("c",)))


def test_what_was_put_is_found_by_the_same_text_only():
    cache = DecisionCache(8, b"v")
    cache.put(cache.key("Hello"), SCORES)
    assert cache.get(cache.key("Hello")) == SCORES
    for other in ("hello", "Hello ", "Ｈello", ""):
        assert cache.get(cache.key(other)) is None


def test_least_recently_used_goes_first():
    cache = DecisionCache(2, b"v")
    a, b, c = map(cache.key, "abc")
    cache.put(a, SCORES)
    cache.put(b, SCORES)
    assert cache.get(a) is not None
    cache.put(c, SCORES)
    assert [cache.get(key) is not None for key in (a, b, c)] == [True, False, True]
    assert len(cache) == 2


def test_putting_again_takes_no_room():
    cache = DecisionCache(2, b"v")
    for text in "aaab":
        cache.put(cache.key(text), SCORES)
    assert len(cache) == 2


@given(st.text(alphabet=st.characters(), max_size=50), st.text(max_size=50))
def test_any_text_has_a_key_of_its_own(one, other):
    cache = DecisionCache(1, b"v")
    assert (cache.key(one) == cache.key(other)) == (one == other)


def test_lone_surrogates_are_told_apart():
    cache = DecisionCache(1, b"v")
    assert cache.key("\ud800") != cache.key("\ud801")


@pytest.mark.parametrize(
    ("rules", "digest"),
    [
        (RULES, "other model"),
        (RULES[:1], "m"),
        (RULES[::-1], "m"),
        ((RouteRule("code", utterances=("a", "x")), RULES[1]), "m"),
        ((RouteRule("code", utterances=("a", "b"), threshold=0.5), RULES[1]), "m"),
    ],
)
def test_whatever_changes_scores_changes_the_version(rules, digest):
    assert routes_version(rules, digest) != routes_version(RULES, "m")


def test_the_version_is_stable_and_blind_to_keywords():
    keyed = (RouteRule("code", utterances=("a", "b"), keywords=("k",)), RULES[1])
    assert routes_version(keyed, "m") == routes_version(RULES, "m")


def test_another_version_finds_nothing():
    old, new = DecisionCache(8, b"old"), DecisionCache(8, b"new")
    assert old.key("x") != new.key("x")
