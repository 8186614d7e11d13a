"""Decisions about prompts into one evaluation."""

import math

import msgspec
import pytest

from extproc.core.errors import RouteReason
from extproc.core.routing import RouteDecision
from extproc.evaluation.evaluate import NO_ROUTE

KEYWORD = RouteDecision("code", RouteReason.KEYWORD, matched="traceback")
LOST = RouteDecision("chat", RouteReason.DEGRADED_WORKER)


def test_headline_figures(evaluated):
    found = evaluated(
        ("a", "code", (0.9, 0.1, 0.1)),
        ("b", "math", (0.5, 0.4, 0.1)),
        ("c", "math", (0.1, 0.2, 0.1)),
        ("d", "chat", (0.1, 0.2, 0.1)),
        ("e", None, (0.1, 0.1, 0.2)),
        ("f", None, (0.1, 0.6, 0.2)),
    )
    assert (found.prompts, found.in_scope) == (6, 4)
    assert found.accuracy.share == 0.5  # a and d; b went to code, c to the default
    assert found.top_1.share == 0.5  # a and c
    assert found.rejection.share == 0.5
    assert found.auroc == pytest.approx(3.5 / 6)
    assert found.reasons == {"semantic": 3, "default": 3}
    assert found.mistaken == 3


def test_keyword_counts_as_decided_and_as_the_worst_mistake_when_wrong(evaluated):
    found = evaluated(("a", "code", KEYWORD), ("b", "math", KEYWORD), ("c", None, (0.31, 0, 0)))
    assert found.top_1.share == 0.5
    worst = found.mistakes[0]
    assert (worst.text, worst.went_to, worst.matched) == ("b", "code", "traceback")
    assert worst.went_to_score is None


def test_prompts_that_no_worker_could_embed_are_told_and_go_to_the_default(evaluated):
    found = evaluated(("a", "code", LOST), ("b", "code", (0.9, 0, 0)))
    assert found.undecided == 1
    assert found.accuracy.share == 0.5
    assert found.mistakes[0].went_to == NO_ROUTE


def test_prompts_that_are_utterances_are_told(evaluated):
    found = evaluated(("An utterance  OF code", "code", (1, 0, 0)), ("a", "code", (1, 0, 0)))
    assert found.repeated == 1


def test_default_without_utterances_takes_its_prompts_as_of_no_route(evaluated):
    nothing = math.nan
    found = evaluated(
        ("a", "chat", (0.1, 0.1, nothing)),
        ("b", None, (0.1, 0.9, nothing)),
        ("c", "code", (0.9, 0.1, nothing)),
        utterances={"code": ("x",), "math": ("y",), "chat": ()},
    )
    assert (found.in_scope, found.accuracy.share, found.rejection.share) == (1, 1.0, 0.5)
    assert found.classes == ("code", "math", NO_ROUTE)
    assert found.confusion == ((1, 0, 0), (0, 0, 0), (0, 1, 1))


def test_mistakes_are_worst_first_and_few_of_a_kind(evaluated):
    rows = [(f"off {i}", "code", (0.3, 0.4 + i / 100, 0)) for i in range(9)]
    found = evaluated(*rows, ("rejected", "code", (0.29, 0, 0)), ("admitted", None, (0, 0.9, 0)))
    texts = [mistake.text for mistake in found.mistakes]
    assert texts == ["admitted", "off 8", "off 7", "off 6", "off 5", "off 4", "rejected"]
    assert [round(mistake.by, 2) for mistake in found.mistakes[:2]] == [0.6, 0.18]
    assert found.mistaken == 11


def test_text_of_a_mistake_is_cut_and_on_one_line(evaluated):
    (mistake,) = evaluated(("a\n\x1b" + "x" * 9999, "code", (0, 0, 0))).mistakes
    assert mistake.text.startswith("a \N{REPLACEMENT CHARACTER}xx")
    assert mistake.text.endswith("x…")
    assert len(mistake.text) < 300


def test_evaluation_of_one_kind_of_prompt_leaves_out_what_it_cannot_tell(evaluated):
    found = evaluated(("a", None, (0, 0, 0)))
    assert (found.accuracy, found.top_1, found.auroc, found.calibration) == (None,) * 4
    found = evaluated(("a", "code", (0, 0, 0)))
    assert (found.rejection, found.auroc, found.calibration) == (None,) * 3


def test_evaluation_has_a_json_form(evaluated):
    found = evaluated(("a", "code", (0.9, 0, math.nan)), ("b", None, (0.1, 0, math.nan)))
    assert b"NaN" not in msgspec.json.encode(found)
