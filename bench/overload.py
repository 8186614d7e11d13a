"""What the router does with three times the prompts it can embed: nothing lost, nothing late, how wrong.

    python bench/overload.py [DATA] [--seconds 20] [--times 3] [--workers 1] [--cascade] [--out FILE]

DATA is a folder with the files that tests/data/prompts has, which is also the default. The path is the
sidecar's own from the body to the decision: exchange, judge, pool, real workers, in one process with the
load, without gRPC and Envoy. Arrivals are open-loop: a decision's time runs from when its prompt was due.
Capacity is measured first, closed-loop. The decision cache is off, or the second round would be hits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import uvloop
from accuracy import SAMPLES, Draw, sets
from prometheus_client import CollectorRegistry

from extproc.app.embedding import Embedding, running_embedding
from extproc.app.judge import Judge, fit_fast_tier, open_static
from extproc.app.plan import compile_plan
from extproc.config import Config, Route, Router, Upstream
from extproc.core.errors import RouteReason
from extproc.core.exchange import (
    Exchange,
    Forward,
    NeedEmbedding,
    Plan,
    RequestBody,
    RequestHeaders,
)
from extproc.embedding.distill import ensure_static
from extproc.embedding.model import default_cache_dir
from extproc.metrics import Metrics

OUT = Path(__file__).parent / "out" / "overload.json"
SETS = ("English: CLINC's 10 domains", "mixed utterances, Chinese prompts")
HEAD = RequestHeaders("POST", "/v1/chat/completions", "application/json", "", end_of_stream=False)
OTHER = "other"
PATIENCE_S = 30.0
CAPACITY_S = 2.0
PROBE_S = 0.02
CALM_S = 0.5
"""Back to normal: no degraded probe for so long."""


@dataclass
class Decided:
    text: str
    route: str
    reason: RouteReason
    seconds: float


class Sidecar:
    """One plan, one judge: what a request meets in the sidecar."""

    def __init__(self, plan: Plan, judge: Judge) -> None:
        self.plan, self.judge = plan, judge

    async def decide(self, text: str, *, due: float, deadline: float) -> Decided:
        exchange = Exchange(self.plan)
        exchange.receive(HEAD)
        body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": text}]})
        action = exchange.receive(RequestBody(body.encode()))
        if isinstance(action, NeedEmbedding):
            action = exchange.receive(await self.judge(action.text, deadline))
        assert isinstance(action, Forward)
        taken = asyncio.get_running_loop().time() - due
        return Decided(text, action.decision.route, action.decision.reason, taken)


def config_for(draw: Draw, arguments: argparse.Namespace) -> Config:
    routes = [Route(name, ("m",), utterances=tuple(own)) for name, own in draw.utterances.items()]
    return Config(
        upstreams={"m": Upstream("m", "m", "http://127.0.0.1:9", "m")},
        routes=(*routes, Route(OTHER, ("m",))),
        router=Router(
            OTHER,
            deadline_s=arguments.deadline,
            workers=arguments.workers,
            cascade=arguments.cascade,
            cache=0,
        ),
    )


def judge_for(
    config: Config, embedding: Embedding, plan: Plan, metrics: Metrics, *, fast: bool
) -> Judge:
    judge = Judge(embedding.embed, plan.index, metrics, cascade=fast and config.router.cascade)
    encoder = open_static(default_cache_dir(os.environ))
    if fast and encoder is not None:
        judge.use(fit_fast_tier(encoder, judge.rules, embedding.each))
    return judge


async def closed_loop(
    router: Sidecar, texts: Sequence[str], *, flights: int, seconds: float | None = None
) -> tuple[list[Decided], float]:
    """Each text once, or for so long as there is time; and decisions a second."""
    loop = asyncio.get_running_loop()
    source = iter(texts) if seconds is None else itertools.cycle(texts)
    began, found = loop.time(), []

    async def feed() -> None:
        for text in source:
            now = loop.time()
            if seconds is not None and now - began > seconds:
                return
            found.append(await router.decide(text, due=now, deadline=now + PATIENCE_S))

    await asyncio.gather(*(feed() for _ in range(flights)))
    return found, len(found) / (loop.time() - began)


async def open_loop(
    router: Sidecar, texts: Sequence[str], *, rate: float, seconds: float, deadline_s: float
) -> tuple[list[Decided], int]:
    """What was decided, and how many were not."""
    loop = asyncio.get_running_loop()
    began, tasks = loop.time(), []
    for number, text in zip(range(int(rate * seconds)), itertools.cycle(texts)):
        due = began + number / rate
        # Behind, arrivals still come one by one, as from a socket: other events have their turn.
        await asyncio.sleep(max(0.0, due - loop.time()))
        # The sidecar's clock starts when it reads the body.
        deadline = loop.time() + deadline_s
        tasks.append(loop.create_task(router.decide(text, due=due, deadline=deadline)))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    decided = [each for each in outcomes if isinstance(each, Decided)]
    return decided, len(outcomes) - len(decided)


async def back_to_normal_s(router: Sidecar, texts: Sequence[str], deadline_s: float) -> float:
    """From the end of the load to the last degraded probe."""
    loop = asyncio.get_running_loop()
    began = last = loop.time()
    for text in itertools.cycle(texts):
        now = loop.time()
        if now - last > CALM_S:
            return last - began
        found = await router.decide(text, due=now, deadline=now + deadline_s)
        if found.reason.value.startswith("degraded"):
            last = loop.time()
        await asyncio.sleep(PROBE_S)
    raise AssertionError


async def run(draw: Draw, arguments: argparse.Namespace) -> dict[str, object]:
    config = config_for(draw, arguments)
    registry = CollectorRegistry()
    metrics = Metrics(registry, fallback_metric="unread", routes=(), upstream_names=())
    labels = {" ".join([text] * arguments.repeat): route for text, route in draw.prompts}
    texts = random.Random(0).sample(list(labels), len(labels))
    async with running_embedding(config, metrics, progress=say) as embedding:
        plan = compile_plan(config, embedding.utterances)
        full = Sidecar(plan, judge_for(config, embedding, plan, metrics, fast=False))
        flights = 2 * (arguments.workers or os.cpu_count() or 1)
        reference, _ = await closed_loop(full, texts, flights=flights)
        wanted = {each.text: each.route for each in reference}
        _, capacity = await closed_loop(full, texts, flights=flights, seconds=CAPACITY_S)
        say(f"capacity {capacity:.0f}/s")
        judge = judge_for(config, embedding, plan, metrics, fast=not arguments.no_static)
        router = Sidecar(plan, judge)
        won = None
        if arguments.cascade:
            _, won = await closed_loop(router, texts, flights=flights, seconds=CAPACITY_S)
        rate = arguments.times * capacity
        before = time.process_time()
        embedded = registry.get_sample_value("pointsman_embed_seconds_sum") or 0.0
        decided, lost = await open_loop(
            router, texts, rate=rate, seconds=arguments.seconds, deadline_s=arguments.deadline
        )
        embed_s = (registry.get_sample_value("pointsman_embed_seconds_sum") or 0.0) - embedded
        loop_share = (time.process_time() - before) / arguments.seconds
        recovery_s = await back_to_normal_s(full, texts, arguments.deadline)
    reasons = Counter(each.reason.value for each in decided)
    took = np.array([each.seconds for each in decided]) * 1e3
    inside = [each for each in decided if labels[each.text] is not None]
    fast = [each for each in inside if each.reason is RouteReason.DEGRADED_FAST]

    def alike(those: Sequence[Decided]) -> float | None:
        return (
            sum(each.route == wanted[each.text] for each in those) / len(those) if those else None
        )

    def right(those: Sequence[Decided]) -> float | None:
        return (
            sum(each.route == labels[each.text] for each in those) / len(those) if those else None
        )

    static, asked = (
        registry.get_sample_value("pointsman_cascade_total", {"encoder": name}) or 0.0
        for name in ("static", "full")
    )
    return {
        "capacity_per_s": capacity,
        "offered_per_s": rate,
        "offered": len(decided) + lost,
        "lost": lost,
        "p50_ms": float(np.percentile(took, 50)),
        "p95_ms": float(np.percentile(took, 95)),
        "p99_ms": float(np.percentile(took, 99)),
        "share_by_reason": {key: count / len(decided) for key, count in reasons.most_common()},
        "as_the_full_encoder": alike(inside),
        "of_degraded_fast": alike(fast),
        "accuracy": right(inside),
        "accuracy_of_the_full_encoder": sum(
            wanted[text] == route for text, route in labels.items() if route
        )
        / sum(route is not None for route in labels.values()),
        "back_to_normal_s": recovery_s,
        "parent_cpu_share": loop_share,
        "worker_share": embed_s / arguments.seconds / (arguments.workers or 1),
        "cascade_share_skipped": static / (static + asked) if static + asked else None,
        "decisions_per_s_with_cascade": won,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=SAMPLES)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--times", type=float, default=3.0, help="offered, in capacities")
    parser.add_argument("--deadline", type=float, default=0.15, help="seconds")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--utterances", type=int, default=20)
    parser.add_argument(
        "--repeat",
        type=int,
        default=8,
        help="a prompt is its text so many times over: with short ones, three capacities of a worker "
        "are more than one event loop can take in",
    )
    parser.add_argument("--cascade", action="store_true")
    parser.add_argument("--no-static", action="store_true", help="as it was without that encoder")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    ensure_static(default_cache_dir(os.environ), progress=say)
    draws = sets(arguments.data, arguments.utterances)
    figures = {}
    for name in SETS:
        say(name)
        figures[name] = uvloop.run(run(draws[name](random.Random(0)), arguments))
        print(json.dumps({name: figures[name]}, indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    conditions = {key: str(value) for key, value in vars(arguments).items()}
    arguments.out.write_text(json.dumps({"conditions": conditions, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
