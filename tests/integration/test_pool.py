"""The real pool, real processes, the real model: answers, bursts, faults, endings."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import uvloop

from extproc.core.errors import RouteReason
from extproc.embedding.encoder import Encoder
from extproc.embedding.model import ModelError, ModelFiles, default_cache_dir, ensure_model
from extproc.embedding.pool import Embedded, NotEmbedded, Pool, RestartCause, SkipCause

LOST = NotEmbedded(RouteReason.DEGRADED_WORKER)
LATE = NotEmbedded(RouteReason.DEGRADED_DEADLINE)
FULL = NotEmbedded(RouteReason.DEGRADED_QUEUE_FULL)
LOOP_LAG_S = 0.25
"""What a busy machine may add to a timer."""


class Recorder:
    def __init__(self) -> None:
        self.depth = 0
        self.embeds: list[float] = []
        self.skips: list[SkipCause] = []
        self.restarts: list[RestartCause] = []

    def queue_depth(self, depth: int) -> None:
        self.depth = depth

    def embedded(self, *, wait_s: float, embed_s: float) -> None:
        self.embeds.append(embed_s)

    def skipped(self, cause: SkipCause) -> None:
        self.skips.append(cause)

    def worker_restarted(self, cause: RestartCause) -> None:
        self.restarts.append(cause)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ensure_model(None, cache_dir=default_cache_dir(os.environ), progress=print)


@pytest.fixture
def loop_factory():
    """The loop that the sidecar runs on."""
    return uvloop.new_event_loop


both_loops = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@pytest.fixture
def scenario(loop_factory, files):
    """Run `steps(pool, events)` with a started pool; no child may outlive it."""

    def play(steps, **options):
        async def whole():
            events = Recorder()
            sizes = {"workers": 2, "queue": 1024} | options
            pool = Pool(files, events=events, **sizes)
            started = time.perf_counter()
            await pool.start()
            print(f"{sizes['workers']} workers warm after {time.perf_counter() - started:.2f} s")
            ever = set(pids(pool))
            try:
                await steps(pool, events)
            finally:
                ever |= set(pids(pool))
                await pool.aclose()
            assert not [pid for pid in ever if alive(pid)]

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(whole())

    return play


def pids(pool: Pool) -> list[int]:
    return [worker.link.pid for worker in pool._workers if worker.link is not None]


def alive(pid: int) -> bool:
    """Running, stopped, or a zombie that nobody has awaited."""
    return Path(f"/proc/{pid}").exists()


async def until(condition, *, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def submit(pool: Pool, text: str, *, within_s: float = 60.0) -> asyncio.Task:
    loop = asyncio.get_running_loop()
    return loop.create_task(pool.embed(text, deadline=loop.time() + within_s))


LONG = "Tell me, in great detail, about the history of the house. " * 20
"""About 4 ms of work."""


# --- answers ---------------------------------------------------------------------------------------


@both_loops
def test_answers_equal_the_encoders_own(scenario, files):
    encoder = Encoder(files)
    texts = ["hello", "帮我修复这个编译错误", "", "\ud800 lone", LONG, "x" * 1_000_000]

    async def steps(pool, events):
        outcomes = await asyncio.gather(*(submit(pool, text) for text in texts))
        for text, outcome in zip(texts, outcomes, strict=True):
            assert isinstance(outcome, Embedded)
            assert outcome.vectors.dtype == np.float32
            assert np.array_equal(outcome.vectors, encoder.encode(text)), text[:20]
        many = await pool.embed_many(texts)
        assert all(np.array_equal(a.vectors, b) for a, b in zip(outcomes, many, strict=True))
        assert len(events.embeds) == 2 * len(texts)
        assert min(events.embeds) > 0

    scenario(steps)


@both_loops
def test_burst_of_300_with_a_deadline_is_answered_in_full_and_in_time(scenario):
    async def steps(pool, events):
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 0.15

        async def ask(number):
            outcome = await pool.embed(f"{number} {LONG}", deadline=deadline)
            return outcome, loop.time()

        answers = await asyncio.gather(*(ask(number) for number in range(300)))
        latest_s = max(at for _, at in answers) - deadline
        outcomes = [outcome for outcome, _ in answers]
        embedded = sum(isinstance(outcome, Embedded) for outcome in outcomes)
        assert embedded + outcomes.count(LATE) == 300
        assert embedded > 0
        assert latest_s < LOOP_LAG_S
        assert events.depth == 0
        await until(lambda: len(pool._idle) == 2)
        done, skipped = len(events.embeds), events.skips.count(SkipCause.DEADLINE)
        assert done + skipped == 300, "what expired was never embedded, save what workers held"
        assert done - embedded <= 2
        print(f"{embedded} embedded, {skipped} skipped, the last {1e3 * latest_s:.1f} ms late")

    scenario(steps)


def test_full_queue_refuses_at_once(scenario):
    async def steps(pool, events):
        outcomes = await asyncio.gather(*(submit(pool, LONG) for _ in range(50)))
        assert outcomes.count(FULL) == 50 - 1 - 8
        assert sum(isinstance(outcome, Embedded) for outcome in outcomes) == 9

    scenario(steps, workers=1, queue=8)


def test_cancelled_callers_are_never_embedded(scenario):
    async def steps(pool, events):
        tasks = [submit(pool, LONG) for _ in range(40)]
        await asyncio.sleep(0)
        for task in tasks[1:-1]:
            task.cancel()
        assert isinstance(await tasks[-1], Embedded)
        assert isinstance(await tasks[0], Embedded)
        assert events.skips == [SkipCause.CALLER_GONE] * 38
        assert len(events.embeds) == 2

    scenario(steps, workers=1)


# --- faults ----------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda n: n.name)
def test_killed_worker_costs_its_entry_and_is_replaced(scenario, number):
    async def steps(pool, events):
        before = set(pids(pool))
        tasks = [submit(pool, LONG) for _ in range(100)]
        await asyncio.sleep(0)
        victim = next(iter(before))
        os.kill(victim, number)
        outcomes = await asyncio.gather(*tasks)
        assert outcomes.count(LOST) <= 1
        assert sum(isinstance(outcome, Embedded) for outcome in outcomes) >= 99
        lost = time.perf_counter()
        await until(lambda: len(pool._idle) == 2)
        print(f"replaced {time.perf_counter() - lost:.2f} s after the burst")
        assert events.restarts == [RestartCause.SIGNAL]
        assert not alive(victim)
        assert isinstance(await submit(pool, "hello"), Embedded)

    scenario(steps)


def test_only_worker_killed_keeps_the_queue_for_its_successor(scenario):
    async def steps(pool, events):
        tasks = [submit(pool, LONG) for _ in range(20)]
        await asyncio.sleep(0)
        os.kill(pids(pool)[0], signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks)
        assert outcomes[0] == LOST
        assert all(isinstance(outcome, Embedded) for outcome in outcomes[1:])

    scenario(steps, workers=1)


@both_loops
def test_machine_without_a_thread_to_spare_costs_time_and_no_seat(scenario, monkeypatch):
    """At the limit of a cgroup's pids, say: the seat was given up for good, and a child left over."""
    start, refused = threading.Thread.start, []

    def starved(thread):
        if thread.name.startswith("reap-") and len(refused) < 2:
            refused.append(int(thread.name.removeprefix("reap-")))
            raise RuntimeError("can't start new thread")
        start(thread)

    async def steps(pool, events):
        monkeypatch.setattr(threading.Thread, "start", starved)
        os.kill(pids(pool)[0], signal.SIGKILL)
        await until(lambda: len(refused) == 2 and pool._idle)
        assert events.restarts == [RestartCause.SIGNAL, RestartCause.START, RestartCause.START]
        assert isinstance(await submit(pool, "hello"), Embedded)
        await until(lambda: not any(map(alive, refused)))

    scenario(steps, workers=1)


@both_loops
def test_only_worker_killed_answers_at_once_who_cannot_wait_for_its_successor(scenario):
    async def steps(pool, events):
        impatient_s = 0.7 * pool._warm_up_s
        tasks = [submit(pool, LONG, within_s=impatient_s) for _ in range(5)]
        await asyncio.sleep(0)
        os.kill(pids(pool)[0], signal.SIGKILL)
        outcomes = await asyncio.gather(*tasks)
        assert LOST in outcomes[1:]
        assert await submit(pool, "comes meanwhile", within_s=impatient_s) == LOST
        assert events.skips == [], "nobody waited until the deadline"
        assert isinstance(await submit(pool, "can wait"), Embedded)

    scenario(steps, workers=1)


@both_loops
def test_stopped_worker_is_killed_and_its_entry_meets_its_own_deadline(scenario):
    async def steps(pool, events):
        loop = asyncio.get_running_loop()
        for pid in (stopped := pids(pool)):
            os.kill(pid, signal.SIGSTOP)
        asked = [submit(pool, "hello", within_s=0.1) for _ in range(5)]
        patient = [submit(pool, "hello") for _ in range(5)]
        started = loop.time()
        assert await asyncio.gather(*asked) == [LATE] * 5
        assert loop.time() - started < 0.1 + LOOP_LAG_S
        outcomes = await asyncio.gather(*patient)
        assert all(isinstance(outcome, Embedded) for outcome in outcomes)
        assert events.restarts == [RestartCause.HANG] * 2
        assert not [pid for pid in stopped if alive(pid)]

    scenario(steps, hang_timeout_s=1.0)


def test_stopped_idle_worker_is_found_by_its_ping(scenario):
    async def steps(pool, events):
        (pid,) = pids(pool)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: events.restarts == [RestartCause.HANG])
        assert isinstance(await submit(pool, "hello"), Embedded)

    scenario(steps, workers=1, hang_timeout_s=1.0, ping_interval_s=0.3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_worker_leaves_signals_to_the_group_to_its_parent(scenario, number):
    async def steps(pool, events):
        for pid in pids(pool):
            os.kill(pid, number)
        assert isinstance(await submit(pool, "hello"), Embedded)
        assert events.restarts == []

    scenario(steps)


# --- start and end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["torn", "gone"])
def test_start_without_a_usable_model_tells_which_file(files, tmp_path, damage):
    onnx = tmp_path / "broken.onnx"
    if damage == "torn":
        with files.onnx.open("rb") as whole:
            onnx.write_bytes(whole.read(1_000_000))
    broken = ModelFiles(onnx, files.tokenizer, files.dimension, files.digest)

    async def start():
        pool = Pool(broken, workers=2, queue=8, events=Recorder())
        with pytest.raises(ModelError, match=r"broken\.onnx: onnxruntime cannot load it"):
            await pool.start()
        assert pids(pool) == []

    asyncio.run(start())


def test_close_ends_stopped_and_starting_workers(files):
    async def whole():
        pool = Pool(files, workers=2, queue=8, events=Recorder())
        await pool.start()
        first, second = ever = pids(pool)
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        await until(lambda: len(pids(pool)) == 2 and set(pids(pool)) != set(ever))
        ever += pids(pool)
        await pool.aclose()
        assert not [pid for pid in ever if alive(pid)]

    asyncio.run(whole())


def test_cancelled_start_leaves_no_child(files):
    async def whole():
        pool = Pool(files, workers=2, queue=8, events=Recorder())
        starting = asyncio.get_running_loop().create_task(pool.start())
        await until(lambda: len(pids(pool)) == 2)
        ever = pids(pool)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not [pid for pid in ever if alive(pid)]

    asyncio.run(whole())


PARENT = """
import asyncio, os, sys
from pathlib import Path
from extproc.embedding.model import ModelFiles
from extproc.embedding.pool import Pool

class Silent:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None

async def main():
    files = ModelFiles(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "")
    pool = Pool(files, workers=2, queue=8, events=Silent())
    await pool.start()
    loop = asyncio.get_running_loop()
    print(*(worker.link.pid for worker in pool._workers), flush=True)
    while True:
        await pool.embed("hello", deadline=loop.time() + 1)

asyncio.run(main())
"""


def test_workers_end_when_their_parent_is_killed(files):
    arguments = [str(files.onnx), str(files.tokenizer), str(files.dimension)]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    give_up = time.monotonic() + 10
    while running := [pid for pid in workers if _running(pid)]:
        assert time.monotonic() < give_up, running
        time.sleep(0.02)


def _running(pid: int) -> bool:
    """An orphan may stay a zombie where the container's first process never waits."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_worker_imports_nothing_of_the_server(files):
    """What a worker loads is memory times cores, and a start-up that restarts wait for."""
    code = """
import socket, sys, threading
from extproc.embedding import worker
ours, theirs = socket.socketpair()
threading.Thread(target=lambda: (ours.recv(64), ours.close())).start()
status = worker.main([str(theirs.detach()), *sys.argv[1:], "digest", "512"])
heavy = {"grpc", "envoy", "aiohttp", "prometheus_client", "asyncio", "onnx", "torch", "uvloop"}
print(status, sorted(heavy & set(sys.modules)))
"""
    arguments = [str(files.onnx), str(files.tokenizer), str(files.dimension)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0 []"
