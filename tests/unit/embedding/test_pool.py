"""The pool's decisions: who gets which entry when, and what every failure becomes."""

from __future__ import annotations

import asyncio

import pytest

from extproc.core.errors import RouteReason
from extproc.embedding.frames import Done, Failed, Unable
from extproc.embedding.link import Closed
from extproc.embedding.model import ModelError
from extproc.embedding.pool import Crew, Embedded, NotEmbedded, RestartCause, SkipCause

LATE = NotEmbedded(RouteReason.DEGRADED_DEADLINE)
FULL = NotEmbedded(RouteReason.DEGRADED_QUEUE_FULL)
LOST = NotEmbedded(RouteReason.DEGRADED_WORKER)


@pytest.fixture
def scenario(lab, run):
    """Run `steps(lab)` with a started pool, and close it."""

    def play(steps, **sizes):
        async def whole():
            await lab.started(**sizes)
            await steps(lab)
            await lab.pool.aclose()

        run(whole())

    return play


# --- dispatch ------------------------------------------------------------------------------------


def test_idle_worker_takes_entry_at_once(scenario):
    async def steps(lab):
        asked = lab.submit("hello")
        await lab.settle()
        assert lab.links[0].texts == ["hello"]
        lab.links[0].done(0.5)
        outcome = await asked
        assert isinstance(outcome, Embedded)
        assert outcome.vectors.tolist() == [[0.5, 0.0]]
        assert (outcome.wait_s, outcome.embed_s) == (0.0, 0.01)
        assert lab.events.embeds == [(0.0, 0.01)]

    scenario(steps)


def test_worker_holds_one_entry_and_takes_them_in_order(scenario):
    async def steps(lab):
        asked = [lab.submit(text) for text in "abc"]
        await lab.until(0.25)
        (link,) = lab.links
        assert link.texts == ["a"]
        link.done()
        assert link.texts == ["a", "b"], "the next entry leaves before any caller wakes"
        link.done()
        link.done()
        assert [(await task).wait_s for task in asked] == [0.0, 0.25, 0.25]
        assert lab.events.depths == [1, 2, 1, 0]

    scenario(steps)


def test_full_queue_refuses_at_once(scenario):
    async def steps(lab):
        asked = [lab.submit(text) for text in "abcd"]
        assert await asked[3] == FULL
        assert lab.loop.time() == 0
        assert not asked[2].done()

    scenario(steps, queue=2)


def test_text_is_bounded_before_it_leaves(scenario):
    async def steps(lab):
        lab.submit("x" * 1_000_000)
        await lab.settle()
        assert len(lab.links[0].jobs[0].text) < 4_200

    scenario(steps)


# --- deadlines and callers -------------------------------------------------------------------------


def test_entry_past_its_deadline_is_answered_then_and_never_embedded(scenario):
    async def steps(lab):
        lab.submit("long", within_s=3)
        late = lab.submit("late", within_s=0.15)
        assert await late == LATE
        assert lab.loop.time() == pytest.approx(0.15)
        lab.links[0].done()
        assert lab.links[0].texts == ["long"]
        assert lab.events.skips == [SkipCause.DEADLINE]

    scenario(steps)


def test_deadline_already_passed_is_late(scenario):
    async def steps(lab):
        assert await lab.pool.embed("x", deadline=lab.loop.time()) == LATE
        assert lab.links[0].jobs == []
        assert lab.events.skips == [SkipCause.DEADLINE]

    scenario(steps)


def test_deadline_that_passes_in_the_worker_answers_late_and_the_worker_goes_on(scenario):
    async def steps(lab):
        slow, waiting = lab.submit("slow", within_s=0.1), lab.submit("next")
        assert await slow == LATE
        lab.links[0].done()
        assert lab.links[0].texts == ["slow", "next"]
        lab.links[0].done()
        assert isinstance(await waiting, Embedded)
        assert lab.events.skips == []

    scenario(steps)


def test_cancelled_caller_is_skipped_and_counted(scenario):
    async def steps(lab):
        lab.submit("busy")
        gone, patient = lab.submit("gone"), lab.submit("patient")
        await lab.settle()
        gone.cancel()
        await lab.settle()
        lab.links[0].done()
        assert lab.links[0].texts == ["busy", "patient"]
        assert lab.events.skips == [SkipCause.CALLER_GONE]
        assert not patient.done()

    scenario(steps)


def test_caller_cancelled_in_the_same_turn_as_the_worker_frees_is_skipped_once(scenario):
    async def steps(lab):
        lab.submit("busy")
        gone = lab.submit("gone")
        await lab.settle()
        gone.cancel()
        lab.loop.call_soon(lab.links[0].done)
        await lab.settle()
        assert lab.links[0].texts == ["busy"]
        assert lab.events.skips == [SkipCause.CALLER_GONE]

    scenario(steps)


def test_cancelled_callers_make_room(scenario):
    async def steps(lab):
        lab.submit("busy")
        gone = lab.submit("gone")
        await lab.settle()
        gone.cancel()
        await lab.settle()
        assert not lab.submit("new").done()
        await lab.settle()
        assert lab.events.depths[-1] == 1

    scenario(steps, queue=1)


# --- faults ----------------------------------------------------------------------------------------


def test_dead_worker_costs_its_entry_in_flight_only(scenario):
    async def steps(lab):
        hit, waiting = lab.submit("hit"), lab.submit("waiting")
        await lab.settle()
        lab.links[0].die(-9)
        assert await hit == LOST
        await lab.until(0.2)
        first, second = lab.links
        assert first.texts == ["hit"]
        assert second.texts == ["waiting"]
        second.done()
        assert isinstance(await waiting, Embedded)
        assert lab.events.restarts == [RestartCause.SIGNAL]

    scenario(steps)


def slow_to_warm(lab, seconds=0.5):
    lab.on_launch = lambda link: lab.loop.call_later(seconds, link.ready)


def test_without_a_worker_who_cannot_wait_for_the_next_is_told_at_once(lab, run):
    async def steps():
        slow_to_warm(lab)
        await lab.started()
        begun = lab.loop.time()
        asked = [lab.submit(text, within_s=0.15) for text in ("in flight", "waiting")]
        patient = lab.submit("patient", within_s=5)
        await lab.settle()
        lab.links[0].die(-9)
        assert [await task for task in asked] == [LOST, LOST]
        assert await lab.submit("comes now", within_s=0.15) == LOST
        assert lab.loop.time() == begun
        assert lab.events.depths[-1] == 1
        await lab.until(begun + 0.1 + 0.5)
        assert lab.links[1].texts == ["patient"]
        lab.links[1].done()
        assert isinstance(await patient, Embedded)
        await lab.pool.aclose()

    run(steps())


def test_one_who_can_wait_for_a_worker_that_is_nearly_warm_waits(lab, run):
    async def steps():
        slow_to_warm(lab)
        await lab.started()
        begun = lab.loop.time()
        lab.links[0].die(-9)
        await lab.until(begun + 0.1 + 0.45)
        asked = lab.submit("comes late", within_s=0.15)
        await lab.until(begun + 0.1 + 0.5)
        lab.links[1].done()
        assert isinstance(await asked, Embedded)
        await lab.pool.aclose()

    run(steps())


def test_with_another_worker_alive_nobody_is_told_so(lab, run):
    async def steps():
        slow_to_warm(lab)
        await lab.started(workers=2)
        asked = [lab.submit(text, within_s=0.15) for text in "abc"]
        await lab.settle()
        lab.links[0].die(-9)
        lab.links[1].done()
        await lab.settle()
        assert lab.links[1].texts[-1] == "c"
        lab.links[1].done()
        assert [isinstance(each, Embedded) for each in await asyncio.gather(*asked)].count(
            True
        ) == 2
        await lab.pool.aclose()

    run(steps())


def test_other_worker_takes_over_while_one_is_dead(scenario):
    async def steps(lab):
        lab.links[1].die(1)
        await lab.settle()
        asked = lab.submit("x")
        await lab.settle()
        lab.links[0].done()
        assert isinstance(await asked, Embedded)
        assert lab.events.restarts == [RestartCause.EXIT]

    scenario(steps, workers=2)


def test_entry_that_a_dying_worker_refuses_goes_to_the_next(scenario):
    async def steps(lab):
        lab.links[1].accepts = False  # the last one on the stack is asked first
        asked = lab.submit("x")
        await lab.settle()
        assert lab.links[0].texts == ["x"]
        lab.links[0].done()
        assert isinstance(await asked, Embedded)

    scenario(steps, workers=2)


def test_entry_refused_by_a_busy_pool_keeps_its_place(scenario):
    async def steps(lab):
        lab.submit("a")
        b, c = lab.submit("b"), lab.submit("c")
        await lab.settle()
        lab.links[0].accepts = False
        lab.links[0].done()
        await lab.until(0.2)
        lab.links[1].done()
        assert lab.links[1].texts == ["b", "c"]
        lab.links[1].done()
        assert isinstance(await b, Embedded)
        assert isinstance(await c, Embedded)

    scenario(steps)


def test_encoder_error_costs_the_entry_but_not_the_worker(scenario):
    async def steps(lab):
        asked = lab.submit("x")
        await lab.settle()
        (link,) = lab.links
        link.say(Failed(link.jobs[0].id, "RuntimeError"))
        assert await asked == LOST
        lab.submit("y")
        await lab.settle()
        assert link.texts == ["x", "y"]
        assert lab.events.restarts == []

    scenario(steps)


def test_hanging_worker_is_killed_and_replaced(scenario):
    async def steps(lab):
        asked = lab.submit("x", within_s=60)
        assert await asked == LOST
        assert lab.links[0].killed_s == pytest.approx(5.5, abs=0.6)
        await lab.until(7)
        assert len(lab.links) == 2
        assert lab.events.restarts == [RestartCause.HANG]

    scenario(steps)


def test_idle_worker_is_pinged_through_its_job_queue(scenario):
    async def steps(lab):
        await lab.until(4)
        assert lab.links[0].texts == ["ping"]
        lab.links[0].done()
        asked = lab.submit("x")
        await lab.settle()
        lab.links[0].done()
        assert isinstance(await asked, Embedded)
        assert len(lab.events.embeds) == 1, "a ping is not traffic"

    scenario(steps)


def test_unanswered_ping_is_a_hang_and_costs_no_entry(scenario):
    async def steps(lab):
        await lab.until(10)
        assert lab.events.restarts == [RestartCause.HANG]

    scenario(steps)


def test_worker_is_not_blamed_for_a_loop_that_stood_still(scenario):
    async def steps(lab):
        asked = lab.submit("x", within_s=60)
        await lab.settle()
        lab.loop.now_s += 30  # the answer lies unread in the socket meanwhile
        await lab.settle()
        assert lab.links[0].killed_s is None
        lab.links[0].done()
        assert isinstance(await asked, Embedded)

    scenario(steps)


@pytest.mark.parametrize(
    "event", [Closed(garbled=True), Done(999, 1, b"", 0.0)], ids=["no frame", "wrong id"]
)
def test_worker_out_of_step_is_killed(scenario, event):
    async def steps(lab):
        asked = lab.submit("x")
        await lab.settle()
        lab.links[0].tell(event)
        assert await asked == LOST
        assert lab.links[0].killed_s == 0
        await lab.settle()
        assert lab.events.restarts == [RestartCause.PROTOCOL]

    scenario(steps)


def test_late_answer_of_a_condemned_worker_changes_nothing(scenario):
    async def steps(lab):
        asked = lab.submit("x")
        await lab.settle()
        lab.links[0].tell(Closed(garbled=True))
        lab.links[0].done()
        assert await asked == LOST
        await lab.settle()
        assert lab.events.embeds == []

    scenario(steps)


def test_leaking_worker_is_replaced_between_two_entries(scenario):
    async def steps(lab):
        asked = lab.submit("x", within_s=5)
        lab.links[0].resident = 1 << 30
        await lab.until(1)
        assert not lab.links[0].closed, "it still works on an entry"
        lab.links[0].done()
        assert isinstance(await asked, Embedded)
        await lab.until(2)
        assert len(lab.links) == 2
        assert lab.events.restarts == [RestartCause.MEMORY]

    scenario(steps)


def test_idle_leaking_worker_is_replaced(scenario):
    async def steps(lab):
        lab.links[0].resident = 1 << 30
        await lab.until(2)
        assert lab.links[0].closed
        assert lab.events.restarts == [RestartCause.MEMORY]

    scenario(steps)


def test_backoff_doubles_to_five_seconds_and_resets_after_a_stable_life(scenario):
    async def steps(lab):
        def die_soon(link):
            lab.soon(lambda: link.die(1))

        lab.on_launch = die_soon
        lab.links[0].die(1)
        await lab.until(25)
        gaps = [b.born_s - a.born_s for a, b in zip(lab.links, lab.links[1:], strict=False)]
        assert gaps[:9] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5])
        assert set(lab.events.restarts[1:]) == {RestartCause.START}

        lab.on_launch = lambda link: lab.soon(link.ready)
        await lab.until(32)
        survivor = lab.links[-1]

        async def answer_pings():
            answered = 0
            while True:
                await asyncio.sleep(0.5)
                if len(survivor.jobs) > answered:
                    answered = len(survivor.jobs)
                    survivor.done()

        pings = lab.loop.create_task(answer_pings())
        await lab.until(70)
        pings.cancel()
        survivor.die(1)
        died_s = lab.loop.time()
        await lab.until(died_s + 1)
        assert lab.links[-1].born_s - died_s == pytest.approx(0.1)

    scenario(steps)


# --- start and end -----------------------------------------------------------------------------------


def test_start_fails_with_the_workers_own_words_and_leaves_nothing(lab, run):
    def unable(link):
        def speak():
            link.say(Unable("model.onnx: torn"))
            link.die(1)

        lab.soon(speak if len(lab.links) == 2 else link.ready)

    async def whole():
        lab.on_launch = unable
        with pytest.raises(ModelError, match=r"^model\.onnx: torn$"):
            await lab.started(workers=3)
        assert all(link.closed for link in lab.links)

    run(whole())


def test_start_names_the_signal_of_a_worker_without_words(lab, run):
    async def whole():
        lab.on_launch = lambda link: lab.soon(lambda: link.die(-11))
        with pytest.raises(ModelError, match=r"model\.onnx: its worker ended with SIGSEGV"):
            await lab.started()

    run(whole())


def test_start_gives_up_on_a_worker_that_never_gets_ready(lab, run):
    async def whole():
        lab.on_launch = lambda link: None
        with pytest.raises(ModelError, match="not loaded within 60 s"):
            await lab.started()

    run(whole())


def test_start_tells_that_no_process_can_be_started(lab, run):
    def refuse(link):
        raise OSError(11, "Resource temporarily unavailable")

    async def whole():
        lab.on_launch = refuse
        with pytest.raises(ModelError, match="Resource temporarily unavailable"):
            await lab.started()

    run(whole())


def test_close_answers_what_waits_and_refuses_what_comes(lab, run):
    async def whole():
        pool = await lab.started()
        asked = [lab.submit(text) for text in "ab"]
        await lab.settle()
        await pool.aclose()
        assert [await task for task in asked] == [LOST, LOST]
        assert await pool.embed("c", deadline=lab.loop.time() + 1) == LOST
        assert lab.events.restarts == []
        await pool.aclose()

    run(whole())


def test_close_kills_a_worker_that_does_not_leave(lab, run):
    async def whole():
        pool = await lab.started()
        lab.links[0].ignores_close = True
        await pool.aclose()
        assert lab.links[0].killed_s == pytest.approx(2)

    run(whole())


def test_close_does_not_wait_for_a_backoff(lab, run):
    async def whole():
        pool = await lab.started()
        lab.on_launch = lambda link: lab.soon(lambda: link.die(1))
        lab.links[0].die(1)
        await lab.until(5)
        before_s = lab.loop.time()
        await pool.aclose()
        assert lab.loop.time() == before_s

    run(whole())


# --- many at start-up --------------------------------------------------------------------------------


def test_embed_many_keeps_the_order_and_ignores_the_queues_bound(scenario):
    async def steps(lab):
        for link in lab.links:
            link.echoes = True
        vectors = await lab.pool.embed_many([str(number) for number in range(20)])
        assert [float(rows[0, 0]) for rows in vectors] == list(range(20))
        assert all(link.jobs for link in lab.links), "every worker had its share"

    scenario(steps, workers=2, queue=1)


def test_embed_many_survives_a_dead_worker(scenario):
    async def steps(lab):
        task = lab.loop.create_task(lab.pool.embed_many(["x"]))
        await lab.settle()
        lab.links[0].die(-9)
        await lab.until(0.2)
        lab.links[1].done(3.0)
        assert (await task)[0].tolist() == [[3.0, 0.0]]

    scenario(steps)


def test_embed_many_gives_up_on_a_text_that_kills_every_worker(scenario):
    async def steps(lab):
        task = lab.loop.create_task(lab.pool.embed_many(["fine", "poison"]))
        await lab.settle()
        lab.links[0].done()
        for at_s in (0.2, 0.5, 1.0):
            lab.links[-1].die(-11)
            await lab.until(at_s)
        with pytest.raises(ModelError, match=r"model\.onnx: 1 of 2 texts"):
            await task

    scenario(steps)


def test_crew_tells_who_works_who_waits_and_whose_seat_is_empty(scenario):
    async def steps(lab):
        assert lab.pool.crew() == Crew(seats=2, busy=0, idle=2, starting=0)
        asked = lab.submit("hello")
        await lab.settle()
        assert lab.pool.crew() == Crew(seats=2, busy=1, idle=1, starting=0)
        next(link for link in lab.links if link.jobs).die(1)
        await asked
        assert lab.pool.crew() == Crew(seats=2, busy=0, idle=1, starting=0)

    scenario(steps, workers=2)
