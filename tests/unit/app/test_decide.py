"""A prompt that is tried: the answer of `POST /route`, its timings, and what meaning says beside a rule."""

from __future__ import annotations

import asyncio
import json

from fakes import CHAT, CODE, FakeEmbedder, make_plan

from extproc.app.decide import Told, decide
from extproc.core.errors import RouteReason


def tried(prompt, answers=None, *, plan=None, **more) -> Told:
    body = json.dumps({"prompt": prompt}).encode()
    embed = FakeEmbedder(answers or {})
    return asyncio.run(decide(plan or make_plan(), embed, body, patience_s=1.0, **more))


def test_best_score_wins_and_the_time_is_told():
    told = tried("hi", {"hi": CHAT})
    assert told.status == 200
    assert (told.answer["route"], told.answer["reason"]) == ("chat", "semantic")
    assert set(told.answer["timings"]) == {"total_ms", "queue_ms", "embed_ms"}


def test_scores_beside_a_rule_are_told_only_when_asked_and_only_as_unasked():
    told = tried("a traceback", {"a traceback": CHAT}, score_anyway=True)
    assert (told.answer["route"], told.answer["matched"]) == ("code", "traceback")
    assert told.answer["scores"] == {}
    assert told.answer["scores_unasked"]["chat"]["score"] > 0.9
    assert "scores_unasked" not in tried("a traceback").answer


def test_model_that_cannot_score_beside_a_rule_spoils_nothing():
    told = tried("a traceback", {"a traceback": RouteReason.DEGRADED_WORKER}, score_anyway=True)
    assert told.answer["route"] == "code"
    assert "scores_unasked" not in told.answer


def test_refusal_is_that_of_the_gateway():
    told = tried("")
    assert (told.status, told.answer["error"]["code"]) == (400, "invalid_prompt")


def test_no_time_is_a_degraded_decision():
    told = tried("x", {"x": RouteReason.DEGRADED_DEADLINE})
    assert (told.answer["route"], told.answer["reason"]) == ("chat", "degraded_deadline")
    assert tried("x", {"x": CODE}).answer["route"] == "code"
