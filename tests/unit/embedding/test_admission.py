"""Who is refused at once because waiting would be in vain."""

from __future__ import annotations

import pytest

from extproc.core.errors import RouteReason
from extproc.embedding.pool import Embedded, NotEmbedded, SkipCause

LATE = NotEmbedded(RouteReason.DEGRADED_DEADLINE)
SERVICE_S = 0.01


@pytest.fixture
def scenario(lab, run):
    """Run `steps(lab)` with a pool that knows that an entry takes 10 ms."""

    def play(steps, **sizes):
        async def whole():
            await lab.started(**sizes)
            asked = lab.submit("learn")
            await lab.until(SERVICE_S)
            next(link for link in lab.links if link.jobs).done()
            assert isinstance(await asked, Embedded)
            lab.start_s = lab.loop.time()
            await steps(lab)
            await lab.pool.aclose()

        run(whole())

    return play


async def admitted(lab, tasks):
    await lab.settle()
    return [not task.done() for task in tasks]


def test_queue_is_as_long_as_the_time_that_entries_have(scenario):
    async def steps(lab):
        # 100 ms of 150 are 10 turns: one in the worker, and half of that one is gone on average.
        tasks = [lab.submit(str(n), within_s=0.15) for n in range(20)]
        assert await admitted(lab, tasks) == [True] * 10 + [False] * 10
        assert {await task for task in tasks[10:]} == {LATE}
        assert lab.loop.time() == lab.start_s, "refused at once"
        assert lab.events.skips == [SkipCause.DEADLINE] * 10

    scenario(steps, queue=1000)


def test_entries_with_more_time_may_wait_longer(scenario):
    async def steps(lab):
        tasks = [lab.submit(str(n), within_s=0.15) for n in range(12)]
        assert (await admitted(lab, tasks))[-1] is False
        patient = lab.submit("patient", within_s=1.0)
        assert await admitted(lab, [patient]) == [True]

    scenario(steps, queue=1000)


def test_two_workers_make_the_queue_twice_as_long(scenario):
    async def steps(lab):
        tasks = [lab.submit(str(n), within_s=0.15) for n in range(40)]
        assert sum(await admitted(lab, tasks)) in (20, 21)

    scenario(steps, workers=2, queue=1000)


def test_idle_worker_takes_an_entry_whatever_the_estimate(scenario):
    async def steps(lab):
        task = lab.submit("hurried", within_s=0.001)
        assert await admitted(lab, [task]) == [True]
        lab.links[0].done()
        assert isinstance(await task, Embedded)

    scenario(steps)


def test_an_estimate_that_a_stall_spoilt_mends_itself(scenario):
    async def steps(lab):
        slow = lab.submit("slow", within_s=60)
        await lab.until(lab.start_s + 4.0)
        lab.links[0].done()
        assert isinstance(await slow, Embedded)
        first, second = (lab.submit(text, within_s=0.15) for text in "ab")
        assert await admitted(lab, [first, second]) == [True, False]
        for _ in range(40):
            lab.links[0].done()
            await lab.settle()
            waiting = lab.submit("x", within_s=0.15)
            await lab.until(lab.loop.time() + SERVICE_S)
            assert not waiting.done()
        lab.links[0].done()
        tasks = [lab.submit(text, within_s=0.15) for text in "abc"]
        assert await admitted(lab, tasks) == [True, True, True]

    scenario(steps)


def test_full_queue_is_still_named_as_that(scenario):
    async def steps(lab):
        tasks = [lab.submit(str(n), within_s=10) for n in range(4)]
        assert await tasks[3] == NotEmbedded(RouteReason.DEGRADED_QUEUE_FULL)

    scenario(steps, queue=2)


def test_short_text_may_wait_where_a_long_one_would_in_vain(scenario):
    async def steps(lab):
        tasks = [lab.submit(str(n), within_s=0.15) for n in range(9)]
        assert all(await admitted(lab, tasks))
        long, short = lab.submit("long " * 100, within_s=0.15), lab.submit("x", within_s=0.15)
        assert await admitted(lab, [long, short]) == [False, True]
        assert await long == LATE

    scenario(steps, queue=1000)


def test_long_texts_make_a_short_one_wait_longer(scenario):
    async def steps(lab):
        tasks = [lab.submit("long " * 100, within_s=0.15) for _ in range(10)]
        assert sum(await admitted(lab, tasks)) == 2, "one in the worker, one behind it"
        assert await admitted(lab, [lab.submit("x", within_s=0.15)]) == [True]

    scenario(steps, queue=1000)
