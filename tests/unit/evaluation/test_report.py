"""The report is one file that fetches nothing, and in which no text is markup."""

import re
from html.parser import HTMLParser

import pytest

from extproc.core.errors import RouteReason
from extproc.core.routing import RouteDecision
from extproc.evaluation.report import Subject, as_html

EVIL = "<script>alert(1)</script> & \"quotes\" 'too' </style> <img src=x onerror=y>"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """What a browser would make of the file; it must be well-formed as well."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.open, self.styles = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.styles if self.open[-1:] == ["style"] else self.texts).append(data)

    @property
    def text(self):
        return "".join(self.texts)


@pytest.fixture
def evil(evaluated):
    keyword = RouteDecision("code", RouteReason.KEYWORD, matched=EVIL)
    found = evaluated(
        (EVIL, "math", (0.9, 0.1, 0.1)),
        ("写一个函数\u202e" + EVIL, None, keyword),
        ("c", "code", (0.9, 0, 0)),
        ("d", None, (0.1, 0, 0)),
    )
    return as_html(found, Subject(EVIL, EVIL, "2031-02-03"))


def test_texts_are_escaped(evil):
    page = Reader(evil)
    assert not page.open
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "link", "object", "base", "form", "a"}
    assert page.text.count(EVIL) >= 5  # title, heading, configuration, two mistakes, the keyword
    assert "写一个函数" in page.text
    assert "\u202e" not in evil
    assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)


def test_nothing_comes_from_outside(evil):
    page = Reader(evil)
    for _, attrs in page.tags:
        assert not attrs.keys() & {"src", "href", "srcset", "data", "action", "xlink:href"}
    (style,) = page.styles
    assert not re.search(r"url\(|@import|expression|//", style.replace("image/", ""))
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_light_and_dark_and_phones_are_provided_for(evil):
    assert "prefers-color-scheme: dark" in evil
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in evil
    assert evil.startswith("<!doctype html>")


def test_figures_confusion_scores_thresholds_and_mistakes_are_there(evaluated):
    found = evaluated(
        *[(f"a{i}", "code", (0.8, 0.1, 0.1)) for i in range(3)],
        ("b", "math", (0.6, 0.2, 0.1)),
        ("nowhere at all", None, (0.1, 0.5, 0.1)),
        ("d", None, (0.1, 0.1, 0.1)),
    )
    page = Reader(as_html(found, Subject("x.jsonl", "x.toml", "2031-02-03")))
    assert "75.0 %" in page.text
    cells = [attrs for tag, attrs in page.tags if tag == "td" and "title" in attrs]
    assert len(cells) == len(found.classes) ** 2
    right = next(attrs for attrs in cells if attrs["title"].startswith("code → code: 3 of 3"))
    assert right["class"].split()[0] == "right"
    marks = [attrs for tag, attrs in page.tags if attrs.get("class") == "mark"]
    assert len(marks) == 3  # a threshold in each route's panel
    assert "nowhere at all" in page.text


def test_panel_has_a_shape_for_each_kind_of_prompt_there_is(evaluated):
    found = evaluated(("a", "code", (0.8, 0.1, 0.1)), ("b", None, (0.1, 0.1, 0.1)))
    page = Reader(as_html(found, Subject("x", "x", "x")))
    shapes = [attrs["class"] for tag, attrs in page.tags if tag == "path"]
    assert sorted(shapes) == ["others"] * 2 + ["outside"] * 3 + ["own"]


@pytest.mark.parametrize("route", ["code", None])
def test_evaluation_of_one_kind_of_prompt_can_be_shown(evaluated, route):
    page = Reader(as_html(evaluated(("a", route, (0, 0, 0))), Subject("x", "x", "x")))
    assert "cannot be calibrated" in page.text


def test_evaluation_without_scores_or_mistakes_can_be_shown(evaluated):
    keyword = RouteDecision("code", RouteReason.KEYWORD, matched="k")
    page = Reader(as_html(evaluated(("a", "code", keyword)), Subject("x", "x", "x")))
    assert "None." in page.text
