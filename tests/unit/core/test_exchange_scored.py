"""Scores in place of vectors: what the exchange makes of the cache's and of the static encoder's."""

from __future__ import annotations

import msgspec
import pytest
from fakes import make_plan

from extproc.core.errors import RouteReason
from extproc.core.exchange import (
    Exchange,
    Forward,
    IllegalEventError,
    NeedEmbedding,
    RequestBody,
    RequestHeaders,
    Respond,
    Scored,
)
from extproc.core.routing import RouteScore

CODE = (RouteScore("code", 0.6, 0.28), RouteScore("chat", 0.5, 0.28))
NONE = (RouteScore("code", 0.1, 0.28), RouteScore("chat", 0.2, 0.28))


def asked(path="/v1/chat/completions"):
    exchange = Exchange(make_plan())
    exchange.receive(RequestHeaders("POST", path, "application/json", "", end_of_stream=False))
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi there"}], "prompt": "hi"}
    assert isinstance(exchange.receive(RequestBody(msgspec.json.encode(body))), NeedEmbedding)
    return exchange


@pytest.mark.parametrize(
    ("event", "route", "reason"),
    [
        (Scored(CODE), "code", RouteReason.SEMANTIC),
        (Scored(NONE), "chat", RouteReason.DEFAULT),
        (Scored(CODE, degraded=True), "code", RouteReason.DEGRADED_FAST),
        (Scored(NONE, degraded=True), "chat", RouteReason.DEGRADED_FAST),
        (Scored((), degraded=True), "chat", RouteReason.DEGRADED_FAST),
    ],
)
def test_scores_decide_and_degraded_ones_say_so(event, route, reason):
    action = asked().receive(event)
    assert isinstance(action, Forward)
    assert (action.decision.route, action.decision.reason) == (route, reason)
    assert action.decision.scores == event.scores


def test_explained_decision_shows_the_static_encoders_scores():
    action = asked("/route").receive(Scored(CODE, degraded=True))
    assert isinstance(action, Respond)
    told = msgspec.json.decode(action.body)
    assert (told["route"], told["reason"]) == ("code", "degraded_fast")
    assert told["scores"]["code"] == {"score": 0.6, "threshold": 0.28}


def test_scores_before_they_are_asked_for_are_illegal():
    with pytest.raises(IllegalEventError):
        Exchange(make_plan()).receive(Scored(CODE))
