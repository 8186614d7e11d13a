"""Thresholds into a configuration's text: nothing else moves, or nothing is written."""

import difflib
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.demo import DEMO_CONFIG
from extproc.evaluation.rewrite import RewriteError, with_thresholds

TEXT = """\
# my routes
[[route]]
name = "code"   # the coder
upstreams = ["a"]
threshold = 0.42# tuned by hand
utterances = [
  "threshold = 0.1",
]

[[ route ]]
  'name' = 'chat'
  upstreams = ["a"]
"""


def changed(old, new):
    lines = difflib.ndiff(old.split("\n"), new.split("\n"))
    return [line for line in lines if line[0] in "+-"]


def test_number_is_replaced_and_a_line_added_below_the_name():
    assert changed(TEXT, with_thresholds(TEXT, {"code": 0.354, "chat": 0.3})) == [
        "- threshold = 0.42# tuned by hand",
        "+ threshold = 0.354# tuned by hand",
        "+   threshold = 0.3",
    ]


def test_route_that_is_not_named_is_left_alone():
    assert changed(TEXT, with_thresholds(TEXT, {"chat": 0.3})) == ["+   threshold = 0.3"]
    assert with_thresholds(TEXT, {}) == TEXT


def test_line_ends_and_byte_order_mark_are_kept():
    windows = "\ufeff" + TEXT.replace("\n", "\r\n")
    plain = with_thresholds(TEXT, {"code": 0.354, "chat": 0.3})
    rewritten = with_thresholds(windows, {"code": 0.354, "chat": 0.3})
    assert rewritten == "\ufeff" + plain.replace("\n", "\r\n")


def test_last_line_without_an_end_gets_none():
    text = '[[route]]\nupstreams = ["a"]\nname = "code"'
    assert with_thresholds(text, {"code": 0.5}) == text + "\nthreshold = 0.5"


def test_subtable_after_a_route_takes_nothing_from_it():
    text = '[[route]]\nname = "code"\n[route.more]\nthreshold = 1\n'
    assert tomllib.loads(with_thresholds(text, {"code": 0.5}))["route"][0] == {
        "name": "code",
        "threshold": 0.5,
        "more": {"threshold": 1},
    }


def test_route_on_a_line_of_its_own_can_be_an_inline_table():
    text = 'route = [\n  { name = "code", threshold = 0.1 },\n]'
    assert with_thresholds(text, {"code": 0.5}) == text.replace("0.1", "0.5")


@pytest.mark.parametrize(
    "text",
    [
        'route = [{ name = "code", upstreams = ["a"] }]',
        '[[route]]\nname = """\ncode"""\n',
        'route = [{ name = "code", utterances = ["threshold = 1"], threshold = 0.1 }]',
    ],
)
def test_text_that_cannot_be_edited_says_what_to_set_by_hand(text):
    with pytest.raises(RewriteError, match=r"by hand: code 0\.5"):
        with_thresholds(text, {"code": 0.5})


def test_demo_keeps_every_line():
    text = DEMO_CONFIG.read_text(encoding="utf-8")
    rewritten = with_thresholds(text, {"code": 0.25, "math": 0.2, "chat": 0.3})
    assert changed(text, rewritten) == [
        "+ threshold = 0.25",
        "+ threshold = 0.2",
        "+ threshold = 0.3",
    ]


@given(st.floats(0, 1))
def test_any_threshold_is_read_back_as_it_was(threshold):
    routes = tomllib.loads(with_thresholds(TEXT, {"code": threshold}))["route"]
    assert routes[0]["threshold"] == threshold
