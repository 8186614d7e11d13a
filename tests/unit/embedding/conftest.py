"""A pool over scripted workers in virtual time: no process, no socket, no waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extproc.embedding.frames import Done, Job, Ready, Reply
from extproc.embedding.link import Closed, Tell
from extproc.embedding.model import ModelFiles
from extproc.embedding.pool import Pool, RestartCause, SkipCause

FILES = ModelFiles(Path("model.onnx"), Path("sp.model"), 2, "digest")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer as soon as nothing else is to be done."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                assert timeout is not None, "nothing will ever happen again"
                loop.now_s += max(0.0, timeout)
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now_s


class FakeLink:
    """A worker that does what the test says."""

    pid = 1

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.jobs: list[Job] = []
        self.born_s = asyncio.get_running_loop().time()
        self.killed_s: float | None = None
        self.closed = False
        self.accepts = True
        self.echoes = False
        """Answer each text, a number, with that number."""
        self.ignores_close = False
        self.resident = 100 << 20
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def texts(self) -> list[str]:
        return [job.text.decode() for job in self.jobs]

    def send(self, job: Job) -> bool:
        if self.accepts:
            self.jobs.append(job)
        if self.echoes:
            asyncio.get_running_loop().call_soon(self.done, float(job.text))
        return self.accepts

    def close(self) -> None:
        self.closed = True
        if not self.ignores_close:
            self._exit(0)

    def kill(self) -> None:
        if self.killed_s is None:
            self.killed_s = asyncio.get_running_loop().time()
        self._exit(-9)

    def resident_bytes(self) -> int:
        return self.resident

    async def exited(self) -> int:
        return await self._status

    def _exit(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)

    def say(self, reply: Reply) -> None:
        self.tell(reply)

    def ready(self) -> None:
        self.say(Ready(2))

    def done(self, value: float = 1.0) -> None:
        """Answer the job in hand with [[value, 0]]."""
        vectors = np.array([[value, 0]], np.float32).tobytes()
        self.say(Done(self.jobs[-1].id, 1, vectors, 0.01))

    def die(self, status: int) -> None:
        self.tell(Closed(garbled=False))
        self._exit(status)


class Recorder:
    def __init__(self) -> None:
        self.depths: list[int] = []
        self.embeds: list[tuple[float, float]] = []
        self.skips: list[SkipCause] = []
        self.restarts: list[RestartCause] = []

    def queue_depth(self, depth: int) -> None:
        self.depths.append(depth)

    def embedded(self, *, wait_s: float, embed_s: float) -> None:
        self.embeds.append((wait_s, embed_s))

    def skipped(self, cause: SkipCause) -> None:
        self.skips.append(cause)

    def worker_restarted(self, cause: RestartCause) -> None:
        self.restarts.append(cause)


class Lab:
    """What a test of the pool works with, inside `run`."""

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.events = Recorder()
        self.on_launch: Callable[[FakeLink], None] = lambda link: self.soon(link.ready)
        self.pool: Pool

    @property
    def loop(self) -> VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop

    def soon(self, call: Callable[[], object]) -> None:
        self.loop.call_soon(call)

    async def launch(self, files: ModelFiles, tell: Tell) -> FakeLink:
        link = FakeLink(tell)
        self.links.append(link)
        self.on_launch(link)
        return link

    async def started(self, *, workers: int = 1, queue: int = 10) -> Pool:
        self.pool = self.make(workers=workers, queue=queue)
        await self.pool.start()
        return self.pool

    def make(self, *, workers: int = 1, queue: int = 10) -> Pool:
        return Pool(FILES, workers=workers, queue=queue, events=self.events, launch=self.launch)

    def submit(self, text: str, *, within_s: float = 1.0) -> asyncio.Task[Any]:
        return self.loop.create_task(self.pool.embed(text, deadline=self.loop.time() + within_s))

    async def settle(self) -> None:
        """Until everything that can happen now has happened; takes no virtual time."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def until(self, at_s: float) -> None:
        await asyncio.sleep(at_s - self.loop.time())
        await self.settle()


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def run() -> Callable[[Awaitable[None]], None]:
    """Run a coroutine to its end in virtual time."""

    def run_virtually(test: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test)

    return run_virtually
