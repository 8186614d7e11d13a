"""What the line does in the moment between two events; the rest is tried through pool and remote encoder."""

from __future__ import annotations

import asyncio

import pytest

from extproc.embedding.waiting import LATE, LOST, Line, SkipCause


class Recorder:
    def __init__(self):
        self.depths, self.skips = [], []

    def queue_depth(self, depth):
        self.depths.append(depth)

    def skipped(self, cause):
        self.skips.append(cause)


@pytest.fixture
def scenario(run):
    """Run `steps(line, events, submit)`."""

    def play(steps):
        async def whole():
            events = Recorder()
            line = Line(events=events, expected_s=lambda _: 0.0, size_of=lambda _: 10)
            loop = asyncio.get_running_loop()

            async def submit(work):
                deadline = loop.time() + 1
                task = loop.create_task(line.submit(work, deadline=deadline, capacity=9))
                await asyncio.sleep(0)
                return task

            await steps(line, events, submit)
            assert line.size == 10 * len(line)

        run(whole())

    return play


def test_entry_whose_time_is_up_before_its_timer_ran_is_not_handed_out(scenario):
    async def steps(line, events, submit):
        late = await submit("late")
        asyncio.get_running_loop().now_s += 1
        assert line.next() is None
        assert await late == LATE
        assert events.skips == [SkipCause.DEADLINE], "once"
        assert events.depths == [1, 0]

    scenario(steps)


def test_entry_whose_caller_left_in_this_very_turn_is_not_handed_out(scenario):
    async def steps(line, events, submit):
        gone, next_one = await submit("gone"), await submit("next")
        gone.cancel()
        assert line.next().work == "next"
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert events.skips == [SkipCause.CALLER_GONE], "once"
        next_one.cancel()

    scenario(steps)


def test_entry_that_does_not_fit_keeps_its_place(scenario):
    async def steps(line, events, submit):
        tasks = [await submit(work) for work in "ab"]
        assert line.next(lambda work: work == "b") is None
        assert len(line) == 2
        entry = line.next()
        assert entry.work == "a"
        line.put_back(entry)
        assert line.next().work == "a"
        line.clear(LOST)
        assert await tasks[1] == LOST
        assert events.depths == [1, 2, 1, 2, 1, 0]
        tasks[0].cancel()

    scenario(steps)
