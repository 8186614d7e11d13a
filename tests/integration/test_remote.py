"""A real embeddings service over sockets: the same decisions, batched; its faults cost nobody an answer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvloop
from embeddings import Embeddings
from gateway import free_ports, gateway, until
from prometheus_client import CollectorRegistry

from extproc.app import embedding as wiring
from extproc.app.embedding import running_embedding
from extproc.app.judge import Judge, fit_fast_tier, open_static
from extproc.app.plan import compile_plan
from extproc.config import Encoder, load
from extproc.core.exchange import Embedded, NotEmbedded, Scored
from extproc.core.routing import RouteRule, SemanticIndex
from extproc.demo import DEMO_CONFIG
from extproc.embedding.distill import ensure_static
from extproc.embedding.model import ModelError, default_cache_dir
from extproc.embedding.remote import COOLDOWN_S
from extproc.metrics import Metrics

CACHE = default_cache_dir(os.environ)
TEXTS = [
    "write a python function that sorts a list",
    "用 Python 写一个函数，读取 CSV 文件",
    "solve the equation 5x + 2 = 17",
    "tell me a funny joke",
    "周末去上海玩有什么推荐",
    "is my credit card blocked",
]
WITHIN_S = 0.5
"""What a prompt is given: more than in production, for the machine is busy."""
LAG_S = 0.4


@pytest.fixture(scope="module")
def served():
    service = Embeddings()
    asyncio.run(service.start())
    yield service
    service.kill()


@pytest.fixture
def service(served):
    yield served
    asyncio.run(served.fault(None))


def config(service, **encoder):
    plain = load(DEMO_CONFIG, environ=None)
    limits = {"deadline_s": 0.3} | encoder
    router = replace(plain.router, encoder=Encoder(url=service.url, **limits))
    return replace(plain, router=router)


class Lab:
    """A running encoder and its metrics."""

    def __init__(self, config, embedding, registry):
        self.config, self.embedding, self.registry = config, embedding, registry

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"pointsman_{name}", labels) or 0.0

    @property
    def is_ready(self):
        return self.count("embedding_service_ready") == 1

    async def ask(self, text):
        return await self.embedding.embed(text, asyncio.get_running_loop().time() + WITHIN_S)

    async def load(self, *, seconds, rate=60):
        """So many prompts a second, each another one; what came of each, and how long the longest took."""
        loop = asyncio.get_running_loop()
        began, longest_s = loop.time(), 0.0

        async def one(number):
            nonlocal longest_s
            await asyncio.sleep(max(0, began + number / rate - loop.time()))
            asked = time.perf_counter()
            outcome = await self.ask(f"{TEXTS[number % len(TEXTS)]} {number}")
            longest_s = max(longest_s, time.perf_counter() - asked)
            return outcome

        outcomes = await asyncio.gather(*(one(number) for number in range(int(seconds * rate))))
        return outcomes, longest_s


@asynccontextmanager
async def running(config, *, required=False):
    registry = CollectorRegistry()
    metrics = Metrics(registry, fallback_metric="f", routes=(), upstream_names=())
    async with running_embedding(config, metrics, progress=print, required=required) as embedding:
        yield Lab(config, embedding, registry)


def play(steps):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(steps())


# --- while it works ----------------------------------------------------------------------------------


def test_vectors_and_decisions_are_those_of_the_same_model_here(service):
    async def steps():
        plain = load(DEMO_CONFIG, environ=None)
        here = replace(plain, router=replace(plain.router, workers=1))
        async with running(here) as local, running(config(service)) as remote:
            for text in TEXTS:
                found, admitted = [], []
                for lab in (local, remote):
                    found.append((await lab.ask(text)).vectors)
                    index = compile_plan(lab.config, lab.embedding.utterances).index
                    admitted.append([each.admitted for each in index.scores(found[-1])])
                assert float((found[0] * found[1]).sum()) > 0.99
                assert admitted[0] == admitted[1]

    play(steps)


def test_burst_goes_in_few_calls_and_all_are_embedded(service):
    async def steps():
        async with running(config(service, max_concurrency=2)) as lab:
            before = (await service.seen())["calls"]
            outcomes = await asyncio.gather(*(lab.ask(f"prompt {n}") for n in range(60)))
            assert all(isinstance(each, Embedded) for each in outcomes)
            calls = (await service.seen())["calls"] - before
            assert calls == 2
            assert lab.count("embed_batch_size_count") == 2
            assert lab.count("embed_batch_size_sum") == 60
            assert lab.count("embed_seconds_count") == 60
            assert lab.count("queue_depth") == 0

    play(steps)


def test_connections_are_kept(service):
    async def steps():
        async with running(config(service)) as lab:
            before = (await service.seen())["connections"]
            for n in range(20):
                assert isinstance(await lab.ask(f"prompt {n}"), Embedded)
            assert (await service.seen())["connections"] - before <= 2

    play(steps)


def test_long_prompt_has_two_vectors(service):
    async def steps():
        async with running(config(service)) as lab:
            outcome = await lab.ask(f"{TEXTS[0]}\n\n{'all work and no play. ' * 200}\n\n{TEXTS[2]}")
            singles = [await lab.ask(TEXTS[0]), await lab.ask(TEXTS[2])]
            assert outcome.vectors.shape[0] == 2
            for row, single in zip(outcome.vectors, singles, strict=True):
                assert float(row @ single.vectors[0]) > 0.98

    play(steps)


@pytest.mark.parametrize(
    "text", ["", " ", "\x00", "\ud800", "😀" * 500, "a" * 1_000_000, "你" * 100_000]
)
def test_any_text_is_embedded(service, text):
    async def steps():
        async with running(config(service)) as lab:
            assert isinstance(await lab.ask(text), Embedded)

    play(steps)


def test_key_model_and_dimensions_are_sent_and_nothing_unasked(service, monkeypatch):
    monkeypatch.setenv("EMBEDDINGS_KEY", "sk-test")

    async def steps():
        async with running(
            config(service, model="m3", api_key_env="EMBEDDINGS_KEY", dimensions=512)
        ) as lab:
            assert isinstance(await lab.ask("hello"), Embedded)
            seen = await service.seen()
            assert seen["keys"] == ["dimensions", "encoding_format", "input", "model"]
            assert seen["headers"]["Authorization"] == "Bearer sk-test"
        async with running(config(service)):
            seen = await service.seen()
            assert seen["keys"] == ["encoding_format", "input"]
            assert "Authorization" not in seen["headers"]

    play(steps)


@pytest.mark.parametrize("kind", ["floats", "floats only"])
def test_services_that_know_no_base64_do(service, kind):
    async def steps():
        await service.fault(kind)
        async with running(config(service)) as lab:
            before = (await service.seen())["calls"]
            assert isinstance(await lab.ask("hello"), Embedded)
            assert (await service.seen())["calls"] - before == 1

    play(steps)


def test_connection_that_closes_as_it_is_used_again_costs_nothing(service):
    async def steps():
        async with running(config(service)) as lab:
            await service.fault("race")
            for n in range(10):
                assert isinstance(await lab.ask(f"prompt {n}"), Embedded)

    play(steps)


# --- faults ------------------------------------------------------------------------------------------

FAULTS = {
    "hang": "timeout",
    "5xx": "5xx",
    "429": "rate_limited",
    "html": "bad_schema",
    "torn json": "bad_schema",
    "one short": "bad_schema",
    "endless": "bad_schema",
    "reset": "connect_error",
    "torn body": "connect_error",
}


@pytest.mark.parametrize(("kind", "cause"), FAULTS.items())
def test_fault_is_named_costs_nobody_an_answer_and_ends_with_its_cause(
    service, kind, cause, caplog
):
    async def steps():
        # Short where it is what ends a call; else long, or a busy machine adds a timeout of its own.
        deadline_s = 0.1 if kind == "hang" else 0.45
        async with running(config(service, deadline_s=deadline_s)) as lab:
            await service.fault(kind)
            outcomes, longest_s = await lab.load(seconds=1.5)
            assert all(isinstance(each, Embedded | NotEmbedded) for each in outcomes)
            assert sum(isinstance(each, NotEmbedded) for each in outcomes) == len(outcomes)
            assert longest_s < WITHIN_S + LAG_S
            assert lab.count("embedding_failures_total", cause=cause) >= 5
            assert not lab.is_ready
            assert lab.embedding.condition() == cause
            calls = (await service.seen())["calls"]
            await lab.load(seconds=0.5)
            assert (await service.seen())["calls"] - calls <= 2, "left alone but for trials"
            await service.fault(None)
            await until(lambda: lab.is_ready, within_s=COOLDOWN_S + 1 + LAG_S)
            assert isinstance(await lab.ask("hello"), Embedded)

    with caplog.at_level(logging.WARNING):
        play(steps)
    assert cause in caplog.text
    assert TEXTS[0] not in caplog.text


@pytest.mark.parametrize("kind", ["401", "redirect"])
def test_what_it_refuses_degrades_and_nothing_is_sent_elsewhere(service, kind):
    async def steps():
        async with running(config(service)) as lab:
            await service.fault(kind)
            outcomes, _ = await lab.load(seconds=0.3)
            assert all(isinstance(each, NotEmbedded) for each in outcomes)
            assert lab.count("embedding_failures_total", cause="refused") >= 5
            await service.fault(None)
            assert isinstance(await lab.ask("hello"), Embedded)

    play(steps)


def test_other_model_is_noticed_and_learned(service):
    async def steps():
        async with running(config(service)) as lab:
            learned = []
            lab.embedding.follow(learned.append)
            await service.fault("other dimension")
            assert isinstance(await lab.ask("hello"), NotEmbedded)
            assert lab.count("embedding_failures_total", cause="bad_schema") == 1
            await until(lambda: lab.is_ready, within_s=3)
            assert (await lab.ask("hello")).vectors.shape == (1, 256)
            assert len(learned) == 1
            assert next(iter(learned[0].vectors.values())).shape[1] == 256

    play(steps)


def test_frozen_service_then_thawed(service):
    async def steps():
        async with running(config(service, deadline_s=0.1)) as lab:
            service.freeze()
            try:
                outcomes, longest_s = await lab.load(seconds=1.5)
            finally:
                service.thaw()
            assert all(isinstance(each, NotEmbedded) for each in outcomes)
            assert longest_s < WITHIN_S + LAG_S
            await until(lambda: lab.is_ready, within_s=COOLDOWN_S + 1 + LAG_S)

    play(steps)


def test_killed_in_mid_run_and_back(service):
    async def steps():
        async with running(config(service)) as lab:
            load = asyncio.create_task(lab.load(seconds=3))
            await asyncio.sleep(1)
            service.kill()
            outcomes, longest_s = await load
            await service.start()
            back = time.perf_counter()
            await until(lambda: lab.is_ready, within_s=COOLDOWN_S + 1 + LAG_S)
            print(f"used again {time.perf_counter() - back:.2f} s after it was back")
            assert all(isinstance(each, Embedded | NotEmbedded) for each in outcomes)
            assert longest_s < WITHIN_S + LAG_S
            assert isinstance(outcomes[0], Embedded)
            assert isinstance(outcomes[-1], NotEmbedded)
            assert isinstance(await lab.ask("hello again"), Embedded)
            assert lab.count("embedding_failures_total", cause="connect_error") > 0

    play(steps)


# --- start -------------------------------------------------------------------------------------------


@pytest.fixture
def away():
    """A service that is not there yet."""
    service = Embeddings()
    yield service
    service.kill()


def test_sidecar_starts_without_it_and_takes_it_when_it_comes(away, monkeypatch):
    monkeypatch.setattr(wiring, "_PATIENCE_S", 0.2)
    ensure_static(CACHE, progress=print)

    async def steps():
        async with running(config(away)) as lab:
            assert lab.embedding.learned is None
            assert lab.embedding.condition() == "connect_error"
            rules = [RouteRule(each.name, each.utterances) for each in lab.config.routes]
            metrics = Metrics(
                CollectorRegistry(), fallback_metric="f", routes=(), upstream_names=()
            )
            plan = compile_plan(lab.config, lab.embedding.utterances)
            assert not plan.index.is_empty, "or no prompt would ever be asked about"
            judge = Judge(lab.embedding.embed, plan.index, metrics, cascade=True)
            judge.use(fit_fast_tier(open_static(CACHE), rules, lab.embedding.each))
            lab.embedding.follow(lambda news: judge.know(SemanticIndex(rules, news.vectors), None))

            async def decide(text):
                return await judge(text, asyncio.get_running_loop().time() + WITHIN_S)

            degraded = await decide(TEXTS[0])
            assert isinstance(degraded, Scored)
            assert degraded.degraded
            assert max(degraded.scores, key=lambda each: each.score).route == "code"
            await away.start()
            await until(lambda: lab.is_ready, within_s=8)
            full = await judge("tell me a joke about cats", asyncio.get_running_loop().time() + 9)
            assert max(full.scores, key=lambda each: each.score).route == "chat"
            assert not full.degraded

    play(steps)


def test_for_a_person_a_dead_service_is_an_error_that_names_it(away):
    async def steps():
        with pytest.raises(
            ModelError, match=rf"{away.port}/v1/embeddings: connect_error.*correct url"
        ):
            async with running(config(away), required=True):
                pass

    play(steps)


def test_refusal_at_start_shows_the_services_own_words(service):
    async def steps():
        await service.fault("401")
        with pytest.raises(ModelError, match=r"refused: status 401.*no such key.*api_key_env"):
            async with running(config(service), required=True):
                pass

    play(steps)


def test_missing_key_is_named(service):
    async def steps():
        with pytest.raises(ModelError, match="NO_SUCH_KEY is not set"):
            async with running(config(service, api_key_env="NO_SUCH_KEY"), required=True):
                pass

    play(steps)


# --- commands and the whole gateway ---------------------------------------------------------------------

ROUTER = """
[router]
default = "chat"
deadline = "500ms"
cache = 0

[router.encoder]
url = "{url}"
deadline = "200ms"

[[route]]
name = "code"
upstreams = ["primary"]
utterances = ["write a python function", "why does this code throw an exception"]

[[route]]
name = "chat"
upstreams = ["fallback"]
utterances = ["hello how are you", "tell me a joke"]
"""
UPSTREAMS = "".join(
    f'[upstream.{name}]\nbase_url = "http://127.0.0.1:9"\nmodel = "m-{name}"\n'
    for name in ("primary", "fallback")
)


def pointsman(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "extproc.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_commands_ask_the_service(service, away, tmp_path):
    path = tmp_path / "pointsman.toml"
    path.write_text(UPSTREAMS + ROUTER.format(url=service.url))
    assert pointsman("check", str(path)).returncode == 0
    shown = pointsman("route", "fix this python code please", "--config", str(path), "--json")
    assert json.loads(shown.stdout)["reason"] == "semantic", shown.stderr
    data = tmp_path / "data.jsonl"
    rows = [{"text": "write python code", "route": "code"}, {"text": "a joke", "route": "chat"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows * 20))
    found = pointsman("eval", str(data), "--config", str(path), "--json")
    assert found.returncode == 0, found.stderr
    path.write_text(UPSTREAMS + ROUTER.format(url=away.url))
    dead = pointsman("route", "hello", "--config", str(path))
    assert dead.returncode == 1
    assert away.url in dead.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sidecar_that_is_told_to_end_while_it_waits_for_the_service_ends(away, tmp_path, number):
    """It used to wait on, up to a minute, then say that it was ready, and drain."""
    path = tmp_path / "pointsman.toml"
    tables = f'[extproc]\nsocket = "{tmp_path}/x.sock"\n[metrics]\nlisten = "127.0.0.1:{free_ports(1)[0]}"\n'
    path.write_text(tables + UPSTREAMS + ROUTER.format(url=away.url))
    command = [sys.executable, "-m", "extproc.cli", "serve", "--config", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as sidecar:
        try:
            assert any("for the vectors of" in line for line in sidecar.stderr)
            told = time.perf_counter()
            sidecar.send_signal(number)
            assert sidecar.wait(timeout=8) == 0
            print(f"ended after {time.perf_counter() - told:.2f} s")
            assert "ready" not in sidecar.stderr.read()
        finally:
            sidecar.kill()


async def reason_for(running, text):
    body = {"model": "auto", "messages": [{"role": "user", "content": text}]}
    answer = await running.chat(body)
    assert answer.status_code == 200
    return answer.headers["x-pointsman-reason"]


async def readyz(running):
    return (await running.client.get(running.metrics_url("/readyz"))).text


DEGRADED = {"degraded_fast", "degraded_worker", "degraded_deadline"}


@pytest.mark.envoy
def test_gateway_answers_while_the_service_is_dead_and_says_so(service):
    async def steps():
        async with gateway(ROUTER.format(url=service.url)) as running:

            async def is_semantic():
                return await reason_for(running, "write a python function please") == "semantic"

            assert await is_semantic()
            assert await readyz(running) == "ok\n"
            service.kill()
            texts = [f"write a python function {n}" for n in range(20)]
            assert {await reason_for(running, text) for text in texts} <= DEGRADED
            assert await readyz(running) == "ok, without the embedding service: connect_error\n"
            assert await running.metric("pointsman_embedding_service_ready") == 0
            await service.start()
            await until(is_semantic, within_s=COOLDOWN_S + 2, every_s=0.1)
            assert await readyz(running) == "ok\n"

    asyncio.run(steps())


@pytest.mark.envoy
def test_gateway_starts_without_the_service_and_takes_it_when_it_comes(away):
    async def steps():
        started = time.perf_counter()
        # The decision cache is on: what was decided without the service must not be remembered.
        async with gateway(ROUTER.replace("cache = 0\n", "").format(url=away.url)) as running:
            print(f"serving after {time.perf_counter() - started:.1f} s")
            prompt = "write a python function please"
            assert await reason_for(running, prompt) in DEGRADED
            assert await readyz(running) == "ok, without the embedding service: connect_error\n"
            log = (running.directory / "sidecar.log").read_text()
            assert f"url = {away.url}: connect_error: Connection refused" in log
            await away.start()

            async def is_semantic():
                return await reason_for(running, prompt) == "semantic"

            await until(is_semantic, within_s=8, every_s=0.1)
            assert await readyz(running) == "ok\n"
            assert await running.metric("pointsman_decision_cache_total", result="hit") == 0
            assert await is_semantic()
            assert await running.metric("pointsman_decision_cache_total", result="hit") == 1

    asyncio.run(steps())
