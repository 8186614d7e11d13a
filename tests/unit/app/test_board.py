"""The board between its two threads: fresh enough, never late for the serving loop, and bounded."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes import CHAT, FakeClock, FakeEmbedder, make_plan
from prometheus_client import CollectorRegistry

from extproc.app.board import Board
from extproc.app.status import POINTS, STEP_S
from extproc.config import parse
from extproc.core.accounts import RequestRecord
from extproc.core.circuit import CircuitPolicy, GateBank
from extproc.core.errors import Outcome
from extproc.core.ledger import Reading
from extproc.embedding.pool import Crew
from extproc.metrics import Metrics
from extproc.serving.envoy_stats import EnvoyStats
from extproc.serving.events import Feed
from extproc.serving.gate import Gate
from extproc.serving.page import NotYetError, TooManyTriesError

CONFIG = parse('[upstream.a]\nbase_url = "http://x.example"\nmodel = "m"\n', file="x", environ=None)


class Desk:
    """A board over real metrics and a real gate; time is the test's. To be made on a loop."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.registry = CollectorRegistry()
        self.metrics = Metrics(
            self.registry,
            fallback_metric="model_fallback_total",
            routes=["default"],
            upstream_names=["a"],
        )
        self.feed = Feed()
        self.board = Board(CONFIG, self.registry, self.feed, clock=self.clock)

    def serve(self, embed=None) -> None:
        bank = GateBank(CircuitPolicy(), {"a": 5.0}, run="r")
        gate = Gate(bank, upstream_names={"a": "a"}, clock=self.clock, metrics=self.metrics)
        self.board.serves(
            gate=gate,
            crew=lambda: Crew(1, 0, 1, 0),
            plan=make_plan(),
            embed=embed or FakeEmbedder({}),
        )

    def told(self, *, after_s: float = 1.0):
        self.clock.advance(after_s)
        self.board.tick()
        return json.loads(self.board.document())


def on_a_loop(steps) -> None:
    async def run() -> None:
        await steps(Desk())

    asyncio.run(run())


def test_document_follows_the_registry_the_gate_and_the_feed() -> None:
    async def steps(desk: Desk) -> None:
        assert desk.told()["state"] == "starting"
        desk.serve()
        desk.metrics.request_ended(Outcome.SERVED, ())
        desk.feed.request_ended(RequestRecord(200, frozenset(), request_id="id"))
        found = desk.told()
        assert found["requests"]["outcomes"]["served"] == {"recent": 1, "total": 1}
        assert found["upstreams"][0]["circuit"]["state"] == "closed"
        assert found["last_requests"][0]["id"] == "id"
        assert found["workers"]["idle"] == 1

    on_a_loop(steps)


def test_silent_loop_shows_as_such_although_nothing_ticks() -> None:
    async def steps(desk: Desk) -> None:
        desk.serve()
        desk.told()
        desk.clock.advance(10)
        assert json.loads(desk.board.document())["alerts"][0]["code"] == "loop_stuck"

    on_a_loop(steps)


def test_viewers_of_one_half_second_share_a_document() -> None:
    async def steps(desk: Desk) -> None:
        desk.told()
        first = desk.board.document()
        desk.metrics.request_ended(Outcome.SERVED, ())
        desk.clock.advance(0.4)
        assert desk.board.document() is first
        desk.clock.advance(0.2)
        assert desk.board.document() != first

    on_a_loop(steps)


def test_history_is_bounded() -> None:
    async def steps(desk: Desk) -> None:
        for _ in range(POINTS + 20):
            found = desk.told(after_s=STEP_S)
        assert len(found["history"]["ago_s"]) == POINTS
        assert found["window_s"] == POINTS * STEP_S

    on_a_loop(steps)


def test_account_is_weighed_when_envoy_is_read_and_unknown_when_it_is_silent() -> None:
    async def steps(desk: Desk) -> None:
        desk.serve()
        desk.metrics.request_ended(Outcome.SERVED, ())
        envoy = EnvoyStats(Reading("e", 1, 0, 0, 0), 1, 0, 0, 0)
        desk.board.envoy_read(envoy)
        desk.metrics.request_ended(Outcome.SERVED, ())  # after the reading: not its business
        assert desk.told()["audit"]["state"] == "adds_up"
        desk.board.envoy_read(None)
        assert desk.told()["audit"]["state"] == "unknown"

    on_a_loop(steps)


def test_prompt_is_tried_on_the_serving_loop_once_there_is_one() -> None:
    async def steps(desk: Desk) -> None:
        body = b'{"prompt": "hi"}'
        with pytest.raises(NotYetError):
            await asyncio.wrap_future(desk.board.decide(body))
        desk.serve(FakeEmbedder({"hi": CHAT}))
        code, answer = await asyncio.wrap_future(
            await asyncio.to_thread(desk.board.decide, body)  # as the admin listener does
        )
        assert (code, json.loads(answer)["route"]) == (200, "chat")

    on_a_loop(steps)


def test_one_prompt_is_tried_at_a_time_and_not_at_once_again() -> None:
    async def steps(desk: Desk) -> None:
        gone_on = asyncio.Event()
        answers = FakeEmbedder({"hi": CHAT})

        async def slow(text: str, deadline: float):
            await gone_on.wait()
            return await answers(text, deadline)

        desk.serve(slow)
        tries = [asyncio.wrap_future(desk.board.decide(b'{"prompt": "hi"}')) for _ in range(5)]
        refused = await asyncio.gather(*tries[1:], return_exceptions=True)
        assert [type(each) for each in refused] == [TooManyTriesError] * 4
        gone_on.set()
        code, _ = await tries[0]
        assert code == 200
        with pytest.raises(TooManyTriesError):
            await asyncio.wrap_future(desk.board.decide(b'{"prompt": "hi"}'))

    on_a_loop(steps)
