"""Who scores a prompt: cache, static encoder or workers, all of them faked."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from fakes import CHAT, CODE, NOWHERE, RULES, FakeEmbedder, embedded, make_plan
from prometheus_client import CollectorRegistry

from extproc.app.judge import FastTier, Judge, fit_fast_tier
from extproc.core.cache import DecisionCache
from extproc.core.errors import RouteReason
from extproc.core.exchange import NotEmbedded, Scored
from extproc.core.routing import THRESHOLD_FEW, RouteRule, RouteScore, SemanticIndex
from extproc.metrics import Metrics

NOW_S = 100.0
DEADLINE_S = NOW_S + 1.0


class FrozenLoop(asyncio.SelectorEventLoop):
    def time(self) -> float:
        return NOW_S


class FakeStatic:
    def __init__(self, table):
        self.table = table
        self.asked = []

    def encode_all(self, texts):
        self.asked.append(list(texts))
        return [np.asarray([self.table[text]], np.float32) for text in texts]


class FakeIndex:
    """The plan's own, with a margin of its own."""

    def __init__(self, margin):
        self.margin = margin
        vectors = {"code": np.float32([CODE]), "chat": np.float32([CHAT] * 2)}
        self.index = SemanticIndex(RULES, vectors)

    def scores_all(self, queries):
        return self.index.scores_all(queries)

    def is_decisive(self, scores):
        return max(each.score for each in scores) > self.margin


class Bench:
    def __init__(self, answers, *, static=None, margin=2.0, **options):
        self.registry = CollectorRegistry()
        self.embed = FakeEmbedder(answers)
        self.plan = make_plan()
        metrics = Metrics(self.registry, fallback_metric="f", routes=(), upstream_names=())
        self.judge = Judge(self.embed, self.plan.index, metrics, **options)
        self.static = FakeStatic(static or {})
        if static is not None:
            self.judge.use(FastTier(self.static, FakeIndex(margin)))

    def ask(self, text):
        with asyncio.Runner(loop_factory=FrozenLoop) as runner:
            return runner.run(self.judge(text, DEADLINE_S))

    def count(self, name, **labels):
        return self.registry.get_sample_value(name, labels)


def best(scored):
    return max(scored.scores, key=lambda each: each.score).route


DEGRADED = [
    RouteReason.DEGRADED_DEADLINE,
    RouteReason.DEGRADED_QUEUE_FULL,
    RouteReason.DEGRADED_WORKER,
]


def test_workers_decide_while_they_can():
    bench = Bench({"x": CODE}, static={"x": CHAT})
    scored = bench.ask("x")
    assert (best(scored), scored.degraded) == ("code", False)
    assert scored.scores == bench.plan.index.scores(embedded(CODE).vectors)
    assert bench.static.asked == []


@pytest.mark.parametrize("reason", DEGRADED)
def test_static_encoder_decides_where_workers_cannot(reason):
    scored = Bench({"x": reason}, static={"x": CODE}).ask("x")
    assert (best(scored), scored.degraded) == ("code", True)


@pytest.mark.parametrize("reason", DEGRADED)
def test_without_a_static_encoder_the_old_reason_stays(reason):
    bench = Bench({"x": reason})
    assert bench.ask("x") == NotEmbedded(reason)
    assert bench.count("pointsman_static_encoder_ready") == 0


def test_static_encoder_serves_from_the_moment_it_is_there():
    bench = Bench({"x": RouteReason.DEGRADED_WORKER})
    assert isinstance(bench.ask("x"), NotEmbedded)
    bench.judge.use(FastTier(FakeStatic({"x": CODE}), FakeIndex(2.0)))
    assert bench.ask("x").degraded
    assert bench.count("pointsman_static_encoder_ready") == 1


def test_workers_are_given_less_than_the_whole_time():
    bench = Bench({"x": CODE})
    bench.ask("x")
    ((_, deadline),) = bench.embed.calls
    assert NOW_S < deadline < DEADLINE_S


def test_text_is_cut_before_anyone_sees_it():
    long = "x" * 1_000_000
    bench = Bench({}, cache=DecisionCache(4, b"v"))
    with pytest.raises(KeyError):
        bench.ask(long)
    ((text, _),) = bench.embed.calls
    assert len(text) < 5_000


# --- cache ----------------------------------------------------------------------------------------


def test_second_time_is_remembered():
    bench = Bench({"x": CODE}, cache=DecisionCache(4, b"v"))
    assert bench.ask("x").scores == bench.ask("x").scores
    assert len(bench.embed.calls) == 1
    assert bench.count("pointsman_decision_cache_total", result="hit") == 1
    assert bench.count("pointsman_decision_cache_total", result="miss") == 1


def test_degraded_decisions_are_never_remembered():
    bench = Bench(
        {"x": RouteReason.DEGRADED_DEADLINE}, static={"x": CHAT}, cache=DecisionCache(4, b"")
    )
    assert bench.ask("x").degraded
    bench.embed.answers = {"x": CODE}
    scored = bench.ask("x")
    assert (best(scored), scored.degraded) == ("code", False)


def test_decisions_of_the_static_encoder_alone_are_not_remembered():
    bench = Bench(
        {"x": CODE}, static={"x": CHAT}, margin=0, cascade=True, cache=DecisionCache(4, b"")
    )
    assert best(bench.ask("x")) == best(bench.ask("x")) == "chat"
    assert bench.count("pointsman_decision_cache_total", result="hit") == 0


def test_without_a_cache_nothing_is_counted():
    bench = Bench({"x": CODE})
    bench.ask("x")
    assert bench.count("pointsman_decision_cache_total", result="miss") == 0


# --- cascade --------------------------------------------------------------------------------------


def test_decisive_static_encoder_spares_the_workers():
    bench = Bench({}, static={"x": CODE}, margin=0.9, cascade=True)
    assert bench.ask("x") == Scored(FakeIndex(0).index.scores(np.float32([CODE])))
    assert bench.embed.calls == []
    assert bench.count("pointsman_cascade_total", encoder="static") == 1


def test_indecisive_static_encoder_leaves_it_to_the_workers():
    bench = Bench({"x": CODE}, static={"x": NOWHERE}, margin=0.9, cascade=True)
    assert best(bench.ask("x")) == "code"
    assert bench.count("pointsman_cascade_total", encoder="full") == 1


def test_cascade_is_off_by_default():
    bench = Bench({"x": CODE}, static={"x": CHAT}, margin=0)
    assert best(bench.ask("x")) == "code"
    assert bench.count("pointsman_cascade_total", encoder="full") == 0


def test_cascade_waits_for_the_static_encoder():
    assert best(Bench({"x": CODE}, cascade=True).ask("x")) == "code"


def test_scores_are_those_that_the_exchange_decides_by():
    assert isinstance(Bench({"x": CODE}).ask("x").scores[0], RouteScore)


def test_prompt_that_is_tried_is_neither_looked_up_nor_remembered():
    bench = Bench({"x": CODE}, cache=DecisionCache(8, b"v"))

    def tried():
        with asyncio.Runner(loop_factory=FrozenLoop) as runner:
            return runner.run(bench.judge.afresh("x", DEADLINE_S))

    assert best(tried()) == "code"
    bench.ask("x")
    assert len(bench.embed.calls) == 2  # so it was not remembered
    tried()
    assert len(bench.embed.calls) == 3  # and not looked up
    bench.ask("x")
    assert len(bench.embed.calls) == 3


# --- utterances that are known late, or anew ------------------------------------------------------


def unlearned(**options):
    bench = Bench({"x": CODE}, cascade=True, **options)
    bench.judge.know(SemanticIndex(RULES, None), None)
    return bench


def test_static_encoder_spares_nobody_before_it_could_be_compared():
    bench = unlearned(static={"x": CHAT}, margin=0)
    bench.embed.answers = {"x": RouteReason.DEGRADED_WORKER}
    scored = bench.ask("x")
    assert (best(scored), scored.degraded) == ("chat", True)
    assert bench.count("pointsman_cascade_total", encoder="static") == 0


def test_what_is_learned_decides_from_then_on():
    bench = Bench({"x": CODE}, cache=DecisionCache(4, b"old"))
    assert best(bench.ask("x")) == "code"
    turned = {"code": np.float32([CHAT]), "chat": np.float32([CODE] * 2)}
    bench.judge.know(SemanticIndex(RULES, turned), DecisionCache(4, b"new"))
    assert best(bench.ask("x")) == "chat", "neither the old index nor the old cache"
    assert len(bench.embed.calls) == 2


def test_rules_are_those_that_prompts_are_scored_by_and_change_with_the_vectors():
    bench = Bench({"x": CODE})
    assert bench.judge.rules == bench.plan.index.rules
    stricter = [replace(rule, threshold=0.9) for rule in RULES]
    bench.judge.know(
        SemanticIndex(stricter, {"code": np.float32([CODE]), "chat": np.float32([CHAT] * 2)}), None
    )
    assert {rule.threshold for rule in bench.judge.rules} == {0.9}
    assert {each.threshold for each in bench.ask("x").scores} == {0.9}


def test_decision_by_what_was_known_before_is_not_remembered():
    bench = Bench({"x": CODE}, cache=DecisionCache(4, b"old"))
    new = DecisionCache(4, b"new")
    ask = bench.embed.__call__

    async def learn_meanwhile(text, deadline):
        bench.judge.know(bench.plan.index, new)
        return await ask(text, deadline)

    bench.judge._embed = learn_meanwhile
    assert best(bench.ask("x")) == "code"
    assert len(new) == 0


def test_unfitted_static_encoder_uses_the_thresholds_of_its_own_model():
    rules = [RouteRule("code", ("a",), threshold=0.9), RouteRule("chat", ("b",), threshold=0.9)]
    tier = fit_fast_tier(FakeStatic({"a": CODE, "b": CHAT}), rules, None)
    tier = FastTier(FakeStatic({"x": CODE}), tier._index)
    with asyncio.Runner(loop_factory=FrozenLoop) as runner:
        scores = runner.run(tier.scores("x"))
    assert [each.threshold for each in scores] == [THRESHOLD_FEW] * 2


def test_prompts_of_one_turn_are_scored_together_each_by_its_own_words():
    static = FakeStatic({"a": CODE, "b": CHAT, "c": NOWHERE})
    tier = FastTier(static, FakeIndex(2.0))

    async def scenario():
        together = await asyncio.gather(*(tier.scores(text) for text in ("a", "b", "c")))
        return [*together, await tier.scores("b")]

    with asyncio.Runner(loop_factory=FrozenLoop) as runner:
        a, b, c, again = runner.run(scenario())
    assert static.asked == [["a", "b", "c"], ["b"]]
    wanted = [FakeIndex(0).index.scores(np.float32([each])) for each in (CODE, CHAT, NOWHERE)]
    assert [a, b, c] == wanted
    assert again == b


def test_prompt_whose_caller_leaves_within_the_turn_is_not_scored():
    static = FakeStatic({"b": CHAT})
    tier = FastTier(static, FakeIndex(2.0))

    async def scenario():
        alone = asyncio.ensure_future(tier.scores("gone"))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        leaving, staying = (asyncio.ensure_future(tier.scores(text)) for text in ("gone", "b"))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    with asyncio.Runner(loop_factory=FrozenLoop) as runner:
        assert best(Scored(runner.run(scenario()))) == "chat"
    assert static.asked == [["b"]]


def test_fault_of_the_static_encoder_reaches_every_caller_of_that_turn_and_no_later_one():
    static = FakeStatic({"a": CODE})
    tier = FastTier(static, FakeIndex(2.0))

    async def scenario():
        first = await asyncio.gather(tier.scores("a"), tier.scores("?"), return_exceptions=True)
        return first, await tier.scores("a")

    with asyncio.Runner(loop_factory=FrozenLoop) as runner:
        failed, later = runner.run(scenario())
    assert [type(each) for each in failed] == [KeyError, KeyError]
    assert best(Scored(later)) == "code"
