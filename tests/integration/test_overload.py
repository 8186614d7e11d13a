"""Overload with the real model and real workers: worse-informed, never uninformed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import uvloop
from ports import free_ports
from prometheus_client import CollectorRegistry

from extproc.app import plan
from extproc.app.embedding import running_embedding
from extproc.app.judge import Judge, build_static, fit_fast_tier, open_static
from extproc.app.plan import compile_plan
from extproc.app.serve import running_sidecar
from extproc.config import load
from extproc.core.errors import RouteReason
from extproc.core.exchange import Exchange, NeedEmbedding, RequestBody, RequestHeaders
from extproc.demo import DEMO_CONFIG
from extproc.embedding.distill import ensure_static
from extproc.embedding.model import default_cache_dir, ensure_model
from extproc.embedding.static import find_static, table_path
from extproc.metrics import Metrics

CACHE = default_cache_dir(os.environ)
HEAD = RequestHeaders("POST", "/v1/chat/completions", "application/json", "", end_of_stream=False)
CLEAR = {
    "write a python function that sorts a list": "code",
    "there is a bug in my javascript, please fix it": "code",
    "用 Python 写一个函数，读取 CSV 文件": "code",
    "solve the equation 5x + 2 = 17": "math",
    "what is the probability of rolling a six with two dice": "math",
    "求这个函数的导数": "math",
    "tell me a funny joke": "chat",
    "周末去上海玩有什么推荐": "chat",
}
NOWHERE = "is my credit card blocked"
NO_TIME_S = -0.001
SLOW = "Tell me, in great detail, about the history of the house. " * 20


@pytest.fixture(scope="module", autouse=True)
def _table():
    ensure_static(CACHE, progress=print)


def config(**router):
    plain = load(DEMO_CONFIG, environ=None)
    return replace(plain, router=replace(plain.router, **({"workers": 1} | router)))


class Gateway:
    """From the body to the decision, as the sidecar does it."""

    def __init__(self, config, embedding, *, static=True):
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry, fallback_metric="f", routes=(), upstream_names=())
        self.plan = compile_plan(config, embedding.utterances)
        self.judge = Judge(embedding.embed, self.plan.index, metrics, cascade=config.router.cascade)
        if static:
            encoder = open_static(CACHE)
            self.judge.use(fit_fast_tier(encoder, self.judge.rules, embedding.each))

    async def decide(self, text, *, within_s):
        exchange = Exchange(self.plan)
        exchange.receive(HEAD)
        body = {"messages": [{"role": "user", "content": text}]}
        action = exchange.receive(RequestBody(msgspec.json.encode(body)))
        assert isinstance(action, NeedEmbedding)
        deadline = asyncio.get_running_loop().time() + within_s
        return exchange.receive(await self.judge(action.text, deadline)).decision


@asynccontextmanager
async def running(config, **options):
    metrics = Metrics(CollectorRegistry(), fallback_metric="f", routes=(), upstream_names=())
    async with running_embedding(config, metrics, progress=print) as embedding:
        yield Gateway(config, embedding, **options)


def play(steps):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(steps())


def test_no_time_gives_the_static_encoders_decision():
    async def steps():
        async with running(config()) as gateway:
            for text, route in CLEAR.items():
                decision = await gateway.decide(text, within_s=NO_TIME_S)
                assert (decision.route, decision.reason) == (route, RouteReason.DEGRADED_FAST), text
                assert decision.scores
            decision = await gateway.decide(NOWHERE, within_s=NO_TIME_S)
            assert (decision.route, decision.reason) == ("chat", RouteReason.DEGRADED_FAST)
            assert not any(each.admitted for each in decision.scores)

    play(steps)


def test_full_queue_gives_the_static_encoders_decision():
    async def steps():
        async with running(config(queue=1)) as gateway:
            slow = [
                asyncio.create_task(gateway.decide(f"{n} {SLOW}", within_s=60)) for n in range(2)
            ]
            await asyncio.sleep(0)
            for text, route in CLEAR.items():
                # A second is time enough: what refuses is the queue.
                decision = await gateway.decide(text, within_s=1)
                if all(not task.done() for task in slow):
                    assert decision.reason is RouteReason.DEGRADED_FAST
                assert decision.route == route
            await asyncio.gather(*slow)

    play(steps)


def test_burst_is_decided_in_full_and_well():
    async def steps():
        async with running(config()) as gateway:
            texts = [(f"{text} {n}", route) for n in range(60) for text, route in CLEAR.items()]
            decisions = await asyncio.gather(
                *(gateway.decide(text, within_s=0.05) for text, _ in texts)
            )
            reasons = {each.reason for each in decisions}
            assert reasons <= {
                RouteReason.SEMANTIC,
                RouteReason.DEFAULT,
                RouteReason.DEGRADED_FAST,
            }
            assert RouteReason.DEGRADED_FAST in reasons
            right = sum(a.route == b for a, (_, b) in zip(decisions, texts, strict=True))
            assert right >= 0.9 * len(texts)

    play(steps)


def children():
    """Whichever thread started them."""
    threads = Path("/proc/self/task").iterdir()
    found = [int(pid) for each in threads for pid in (each / "children").read_text().split()]
    # Fixtures of a whole session have children of their own.
    return [
        pid
        for pid in found
        if b"extproc.embedding.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_prompt_of_a_killed_worker_is_decided_by_the_static_encoder():
    async def steps():
        async with running(config()) as gateway:
            (pid,) = children()
            os.kill(pid, signal.SIGSTOP)
            asked = asyncio.create_task(gateway.decide("tell me a funny joke", within_s=30))
            await asyncio.sleep(0.05)
            assert not asked.done()
            os.kill(pid, signal.SIGKILL)
            decision = await asyncio.wait_for(asked, 5)
            assert (decision.route, decision.reason) == ("chat", RouteReason.DEGRADED_FAST)

    play(steps)


def test_workers_leave_the_cores_to_the_loop():
    async def steps():
        async with running(config()):
            (pid,) = children()
            assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)

    play(steps)


def test_without_the_table_the_default_route_is_taken_with_the_old_reason():
    async def steps():
        async with running(config(), static=False) as gateway:
            decision = await gateway.decide("solve the equation 5x = 10", within_s=NO_TIME_S)
            assert (decision.route, decision.reason) == ("chat", RouteReason.DEGRADED_DEADLINE)

    play(steps)


def test_cascade_decides_what_is_clear_and_leaves_the_rest():
    async def steps():
        async with running(config(cascade=True)) as gateway:
            for text, route in CLEAR.items():
                decision = await gateway.decide(text, within_s=10)
                assert (decision.route, decision.reason) == (route, RouteReason.SEMANTIC)
            static, full = (
                gateway.registry.get_sample_value("pointsman_cascade_total", {"encoder": name})
                for name in ("static", "full")
            )
            assert static > 0
            assert static + full == len(CLEAR)

    play(steps)


@pytest.fixture
def bare_cache(tmp_path, monkeypatch):
    """The model is there, the table is not."""
    onnx = ensure_model(None, cache_dir=CACHE, progress=print).onnx
    for path in (onnx, onnx.with_suffix(".json")):
        shutil.copy(path, tmp_path)
    monkeypatch.setenv("POINTSMAN_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.timeout(300)  # the builder lets everything else on the machine go first
def test_first_start_is_ready_before_the_table_and_uses_it_once_it_is_there(
    bare_cache, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    estimates = Mock(wraps=plan.calibrated)
    monkeypatch.setattr(plan, "calibrated", estimates)
    plain = config()
    listen = [
        replace(each, port=port)
        for each, port in zip((plain.metrics, plain.admin), free_ports(2), strict=True)
    ]
    gateway = replace(
        plain, metrics=listen[0], admin=listen[1], extproc_socket=str(bare_cache / "x.sock")
    )

    async def steps():
        async with running_sidecar(gateway, progress=print) as registry:
            assert registry.get_sample_value("pointsman_static_encoder_ready") == 0
            async with asyncio.timeout(280):
                while not registry.get_sample_value("pointsman_static_encoder_ready"):
                    await asyncio.sleep(0.1)
        assert find_static(bare_cache) is not None

    play(steps)
    assert "building the static encoder in the background" in caplog.text
    assert "static encoder built in" in caplog.text
    assert estimates.call_count == 1, "index, cache and fast tier share their thresholds"


def test_end_of_the_sidecar_ends_the_builder(bare_cache):
    async def steps():
        building = asyncio.create_task(build_static(bare_cache))
        await asyncio.sleep(0.5)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    play(steps)  # joins the thread that waits for the child
    assert find_static(bare_cache) is None


def test_builder_that_fails_is_logged_with_its_own_words(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")

    async def steps():
        assert await build_static(tmp_path / "file") is None

    play(steps)
    assert "POINTSMAN_CACHE" in caplog.text
    assert not table_path(tmp_path).exists()
