"""The remote encoder over a scripted service in virtual time: who is sent when, and what failure becomes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.embedding.batch import Budget, _work, work_of
from extproc.embedding.remote import COOLDOWN_S, Limits, Remote
from extproc.embedding.service import Failure, Fault
from extproc.embedding.waiting import FULL, LATE, LOST, Embedded, SkipCause

DEADLINE_S = 0.1
BROKEN = Failure(Fault.SERVER_ERROR, "status 500")
REFUSED = Failure(Fault.REFUSED, "status 413")
AWAY = Failure(Fault.CONNECT_ERROR, "refused")
UTTERANCES = ["write a function", "hello"]
A_WHILE_S = COOLDOWN_S + 0.1


class Call:
    def __init__(self, texts):
        self.texts = list(texts)
        self.reply = asyncio.get_running_loop().create_future()

    def answer(self, result=None):
        self.reply.set_result(vectors(self.texts) if result is None else result)


class FakeService:
    """Answers at once what `result` says; where that is None, when the test does."""

    def __init__(self):
        self.calls = []
        self.result = vectors
        self.taken_s = 0.0

    async def embed(self, texts, *, timeout_s):
        call = Call(texts)
        self.calls.append(call)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.taken_s)
                return await call.reply if self.result is None else self.result(texts)
        except TimeoutError:
            return Failure(Fault.TIMEOUT, "late")


def vectors(texts, dimension=3):
    """Each text's length, as an angle: texts of the same length are the same to this model."""
    angles = np.array([len(text) / 100 for text in texts])
    columns = [np.cos(angles), np.sin(angles)] + [np.zeros(len(texts))] * (dimension - 2)
    return np.stack(columns, axis=1).astype(np.float32)


def reply(result):
    return lambda _: result


class Recorder:
    def __init__(self):
        self.depth = 0
        self.embeds = []
        self.skips = []
        self.sizes = []
        self.faults = []
        self.ready = []

    def queue_depth(self, depth):
        self.depth = depth

    def embedded(self, *, wait_s, embed_s):
        self.embeds.append((wait_s, embed_s))

    def skipped(self, cause):
        self.skips.append(cause)

    def call_sent(self, entries):
        self.sizes.append(entries)

    def call_failed(self, fault):
        self.faults.append(fault)

    def service_ready(self, *, ready):
        self.ready.append(ready)


class Lab:
    def __init__(self, *, tokens=1000, inputs=32, concurrency=1, queue=100, utterances=UTTERANCES):
        self.service = FakeService()
        self.events = Recorder()
        self.learned = []
        self.said = []
        self.remote = Remote(
            self.service,
            utterances,
            limits=Limits(DEADLINE_S, Budget(tokens, inputs), concurrency, queue),
            events=self.events,
            learned=lambda known, generation: self.learned.append((generation, len(known))),
            progress=self.said.append,
        )

    @property
    def loop(self):
        return asyncio.get_running_loop()

    @property
    def calls(self):
        return self.service.calls

    def submit(self, text="x", *, within_s=1.0):
        deadline = self.loop.time() + within_s
        return self.loop.create_task(self.remote.embed(text, deadline=deadline))

    async def start(self, *, patience_s=10.0, limit_s=60.0):
        failure = await self.remote.start(patience_s=patience_s, limit_s=limit_s)
        self.calls.clear()
        return failure

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)

    async def after(self, seconds):
        await asyncio.sleep(seconds)
        await self.settle()

    async def fail(self, times, failure=BROKEN):
        self.service.result = reply(failure)
        for _ in range(times):
            assert await self.submit() in (LOST, LATE)


@pytest.fixture
def scenario(run):
    """Run `steps(lab)` with a started encoder whose calls the test answers, and close it."""

    def play(steps, *, answers=False, **options):
        async def whole():
            lab = Lab(**options)
            assert await lab.start() is None
            if not answers:
                lab.service.result = None
            await steps(lab)
            await lab.remote.aclose()

        run(whole())

    return play


# --- batches -----------------------------------------------------------------------------------------


def test_entry_alone_leaves_at_once(scenario):
    async def steps(lab):
        asked = lab.submit("hello")
        await lab.settle()
        assert [call.texts for call in lab.calls] == [["hello"]]
        await lab.after(0.02)
        lab.calls[0].answer()
        outcome = await asked
        assert outcome.vectors.tolist() == vectors(["hello"]).tolist()
        assert (outcome.wait_s, outcome.embed_s) == (0.0, pytest.approx(0.02))
        assert lab.events.embeds == [(0.0, pytest.approx(0.02))]
        assert lab.events.depth == 0

    scenario(steps)


def test_what_arrives_in_one_turn_leaves_in_one_call(scenario):
    async def steps(lab):
        asked = [lab.submit(text) for text in ("a", "bb", "ccc")]
        await lab.settle()
        assert [call.texts for call in lab.calls] == [["a", "bb", "ccc"]]
        lab.calls[0].answer()
        for text, task in zip(("a", "bb", "ccc"), asked, strict=True):
            assert (await task).vectors.tolist() == vectors([text]).tolist()
        assert lab.events.sizes == [3]

    scenario(steps)


def test_what_waits_leaves_together_when_a_call_ends(scenario):
    async def steps(lab):
        lab.submit("first")
        await lab.settle()
        for text in "abc":
            lab.submit(text)
            await lab.settle()
        assert len(lab.calls) == 1
        assert lab.events.depth == 3
        lab.calls[0].answer()
        await lab.settle()
        assert lab.calls[1].texts == ["a", "b", "c"]

    scenario(steps)


def test_as_many_calls_as_allowed_are_in_flight(scenario):
    async def steps(lab):
        for text in "abc":
            lab.submit(text)
            await lab.settle()
        assert [call.texts for call in lab.calls] == [["a"], ["b"]]

    scenario(steps, concurrency=2)


def test_call_is_filled_up_to_its_texts(scenario):
    async def steps(lab):
        for number in range(5):
            lab.submit(str(number))
        await lab.settle()
        lab.calls[0].answer()
        await lab.settle()
        lab.calls[1].answer()
        await lab.settle()
        assert [len(call.texts) for call in lab.calls] == [2, 2, 1]

    scenario(steps, inputs=2)


def test_call_is_filled_up_to_its_tokens_and_one_text_may_exceed_them(scenario):
    async def steps(lab):
        small, large = "a" * 40, "b" * 400
        for text in (small, small, large, small):
            lab.submit(text)
        for at in range(3):
            await lab.settle()
            lab.calls[at].answer()
        assert [call.texts for call in lab.calls] == [[small, small], [large], [small]]

    scenario(steps, tokens=2 * work_of("a" * 40).tokens)


def test_long_text_has_two_vectors_and_its_neighbours_their_own(scenario):
    async def steps(lab):
        filler = "the quick brown fox jumps. " * 60
        asked = [lab.submit(text) for text in ("a", f"head\n\n{filler}\n\ntail", "bb")]
        await lab.settle()
        assert lab.calls[0].texts == ["a", "head", "tail", "bb"]
        lab.calls[0].answer()
        shapes = [(await task).vectors.shape for task in asked]
        assert shapes == [(1, 3), (2, 3), (1, 3)]
        assert lab.events.sizes == [3]

    scenario(steps)


# --- deadlines, callers, admission -------------------------------------------------------------------


def test_entry_past_its_deadline_is_never_sent(scenario):
    async def steps(lab):
        lab.submit("first")
        await lab.settle()
        late = lab.submit("late", within_s=0.05)
        assert await late == LATE
        lab.calls[0].answer()
        await lab.settle()
        assert len(lab.calls) == 1
        assert lab.events.skips == [SkipCause.DEADLINE]

    scenario(steps)


def test_entry_whose_caller_has_gone_is_never_sent(scenario):
    async def steps(lab):
        lab.submit("first")
        await lab.settle()
        gone = lab.submit("gone")
        await lab.settle()
        gone.cancel()
        await lab.settle()
        lab.calls[0].answer()
        await lab.settle()
        assert len(lab.calls) == 1
        assert lab.events.skips == [SkipCause.CALLER_GONE]
        assert lab.events.depth == 0

    scenario(steps)


def test_full_line_refuses_at_once(scenario):
    async def steps(lab):
        lab.submit("first")
        await lab.settle()
        waiting = [lab.submit() for _ in range(3)]
        await lab.settle()
        assert [task.done() and task.result() for task in waiting] == [False, False, FULL]

    scenario(steps, queue=2)


def test_who_would_wait_in_vain_is_refused_at_once(scenario):
    async def steps(lab):
        lab.service.result, lab.service.taken_s = vectors, 0.08
        assert isinstance(await lab.submit(), Embedded)
        # A call takes 80 ms: one that is half done, then one's own, are 120.
        lab.submit("in flight")
        await lab.settle()
        hurried, patient = lab.submit(within_s=0.15), lab.submit(within_s=0.5)
        await lab.settle()
        assert hurried.result() == LATE
        assert not patient.done()
        assert lab.events.skips == [SkipCause.DEADLINE]

    scenario(steps)


def test_free_call_takes_an_entry_whatever_the_estimate(scenario):
    async def steps(lab):
        lab.service.result, lab.service.taken_s = vectors, 0.08
        await lab.submit()
        asked = lab.submit(within_s=0.09)
        assert isinstance(await asked, Embedded)

    scenario(steps)


# --- failures ----------------------------------------------------------------------------------------


def test_call_that_hangs_is_late_for_all_in_it(scenario):
    async def steps(lab):
        asked = [lab.submit() for _ in range(3)]
        assert [await task for task in asked] == [LATE] * 3
        assert lab.loop.time() == pytest.approx(DEADLINE_S)
        assert lab.events.faults == [Fault.TIMEOUT]

    scenario(steps)


@pytest.mark.parametrize("fault", [each for each in Fault if each is not Fault.TIMEOUT])
def test_call_that_fails_degrades_all_in_it_at_once(scenario, fault):
    async def steps(lab):
        asked = [lab.submit() for _ in range(3)]
        await lab.settle()
        lab.calls[0].answer(Failure(fault, ""))
        assert [await task for task in asked] == [LOST] * 3
        assert lab.loop.time() == 0
        assert lab.events.faults == [fault]

    scenario(steps)


def test_failures_in_a_row_open_the_circuit_and_then_nobody_waits(scenario):
    async def steps(lab):
        await lab.fail(5)
        assert len(lab.calls) == 5
        assert await lab.submit() == LOST
        assert len(lab.calls) == 5
        assert lab.remote.condition == "5xx"
        assert lab.events.ready == [True, False]

    scenario(steps)


def test_calls_in_flight_together_fail_for_one_reason(scenario):
    async def steps(lab):
        for _ in range(4):
            for text in "abcd":
                lab.submit(text)
                await lab.settle()
            assert len(lab.calls) % 4 == 0
            await lab.after(DEADLINE_S)
        assert lab.events.faults == [Fault.TIMEOUT] * 16
        assert lab.remote.condition == ""
        lab.submit("e")
        await lab.after(DEADLINE_S)
        assert lab.remote.condition == "timeout"

    scenario(steps, concurrency=4)


def test_success_between_failures_keeps_the_circuit_closed(scenario):
    async def steps(lab):
        for _ in range(5):
            await lab.fail(4)
            lab.service.result = vectors
            assert isinstance(await lab.submit(), Embedded)

    scenario(steps)


def test_timeout_that_our_own_loop_came_late_to_is_no_failure_of_the_service(scenario):
    async def steps(lab):
        for _ in range(10):
            asked = lab.submit()
            await lab.settle()
            lab.loop.now_s += 0.2  # as if something else had kept the loop
            assert await asked == LATE
        assert lab.events.faults == [Fault.TIMEOUT] * 10
        assert lab.remote.condition == ""

    scenario(steps)


def test_those_that_wait_are_told_when_the_circuit_opens(scenario):
    async def steps(lab):
        await lab.fail(4)
        lab.service.result = None
        lab.submit()
        await lab.settle()
        waiting = lab.submit()
        await lab.settle()
        lab.calls[-1].answer(BROKEN)
        assert await waiting == LOST
        assert lab.loop.time() == 0
        assert lab.events.depth == 0

    scenario(steps)


def test_trial_after_the_cooldown_is_an_utterance_and_mends(scenario):
    async def steps(lab):
        await lab.fail(5)
        lab.service.result = vectors
        assert await lab.submit() == LOST
        await lab.after(A_WHILE_S)
        assert lab.calls[-1].texts == UTTERANCES[:1]
        assert lab.remote.condition == ""
        assert isinstance(await lab.submit(), Embedded)
        assert lab.events.ready == [True, False, True]
        assert len(lab.learned) == 1

    scenario(steps)


def test_trial_that_fails_keeps_prompts_away_for_another_cooldown(scenario):
    async def steps(lab):
        await lab.fail(5, AWAY)
        for _ in range(3):
            await lab.after(A_WHILE_S)
            assert await lab.submit() == LOST
        assert {tuple(call.texts) for call in lab.calls[5:]} == {("write a function",)}
        assert 2 <= len(lab.calls) - 5 <= 3
        assert lab.remote.condition == "connect_error"

    scenario(steps)


def test_refused_texts_do_not_keep_out_the_others(scenario):
    async def steps(lab):
        await lab.fail(10, REFUSED)
        lab.service.result = vectors
        assert isinstance(await lab.submit(), Embedded)

    scenario(steps)


def test_refused_trial_is_tried_again(scenario):
    async def steps(lab):
        await lab.fail(5)
        lab.service.result = reply(REFUSED)
        await lab.after(A_WHILE_S)
        assert lab.remote.condition == "refused"
        lab.service.result = vectors
        await lab.after(A_WHILE_S)
        assert isinstance(await lab.submit(), Embedded)

    scenario(steps)


# --- another model -----------------------------------------------------------------------------------


def test_other_dimension_degrades_and_the_utterances_are_embedded_anew(scenario):
    async def steps(lab):
        lab.service.result = lambda texts: vectors(texts, 5)
        assert await lab.submit() == LOST
        assert lab.events.faults == [Fault.BAD_SCHEMA]
        assert lab.remote.condition == "bad_schema"
        await lab.after(0.6)
        assert (await lab.submit()).vectors.shape == (1, 5)
        assert lab.learned == [(0, 2), (1, 2)]
        assert lab.events.ready == [True, False, True]

    scenario(steps)


def test_answer_to_a_question_from_before_the_change_is_worth_nothing(scenario):
    async def steps(lab):
        lab.service.result = vectors
        await lab.after(31)  # all is well for so long that the next change is learned at once
        lab.calls.clear()
        lab.service.result = None
        old = lab.submit("old")
        await lab.settle()
        new = lab.submit("new")
        await lab.settle()
        first, second = lab.calls
        lab.service.result = lambda texts: vectors(texts, 5)
        second.answer(vectors(["new"], 5))
        assert await new == LOST
        await lab.after(0.05)
        assert len(lab.learned) == 2
        first.answer(vectors(["old"], 5))
        assert await old == LOST

    scenario(steps, concurrency=2)


def test_other_model_of_the_same_dimension_is_noticed_in_a_while(scenario):
    async def steps(lab):
        lab.service.result = lambda texts: -vectors(texts)
        await lab.after(31)
        assert lab.events.faults == [Fault.BAD_SCHEMA]
        assert lab.learned == [(0, 2), (1, 2)]
        assert isinstance(await lab.submit(), Embedded)

    scenario(steps)


def test_models_that_take_turns_cost_a_bounded_number_of_calls(scenario):
    async def steps(lab):
        lab.service.result = lambda texts: vectors(texts, 3 + len(lab.calls) % 2)
        for _ in range(600):
            lab.submit(within_s=0.09)
            await lab.after(0.1)
        assert 3 < len(lab.learned) < 25

    scenario(steps)


# --- start and end -----------------------------------------------------------------------------------


def test_utterances_are_embedded_in_calls_as_full_as_allowed(run):
    async def steps():
        lab = Lab(inputs=4, utterances=[f"{n}" for n in range(10)])
        assert await lab.remote.start(patience_s=0, limit_s=60) is None
        assert [len(call.texts) for call in lab.calls] == [4, 4, 2]
        assert lab.learned == [(0, 10)]
        await lab.remote.aclose()

    run(steps())


def test_dead_service_is_waited_for_in_bounds_and_taken_when_it_comes(run):
    async def steps():
        lab = Lab()
        lab.service.result = reply(AWAY)
        assert await lab.start(patience_s=10) == AWAY
        assert 10 <= lab.loop.time() < 16
        assert await lab.submit() == LOST
        assert lab.remote.condition == "connect_error"
        lab.service.result = vectors
        await lab.after(6)
        assert isinstance(await lab.submit(), Embedded)
        assert lab.learned == [(0, 2)]
        await lab.remote.aclose()

    run(steps())


def test_what_waiting_does_not_mend_is_told_at_once(run):
    async def steps():
        lab = Lab()
        lab.service.result = reply(REFUSED)
        assert await lab.start(patience_s=10) == REFUSED
        assert lab.loop.time() == 0
        await lab.remote.aclose()

    run(steps())


def test_hung_service_holds_up_the_start_no_longer_than_the_limit(run):
    async def steps():
        lab = Lab()
        lab.service.result = None
        assert (await lab.start(patience_s=60, limit_s=5)).fault is Fault.TIMEOUT
        assert lab.loop.time() == pytest.approx(5)
        await lab.remote.aclose()

    run(steps())


def test_service_with_two_models_at_start_is_refused(run):
    async def steps():
        lab = Lab(inputs=1)
        lab.service.result = lambda texts: vectors(texts, 2 + len(texts[0]))
        assert (await lab.start()).fault is Fault.BAD_SCHEMA
        await lab.remote.aclose()

    run(steps())


def test_close_answers_everybody(run):
    async def steps():
        lab = Lab()
        await lab.start()
        lab.service.result = None
        asked = [lab.submit("in flight")]
        await lab.settle()
        asked += [lab.submit(), lab.submit()]
        await lab.settle()
        await lab.remote.aclose()
        assert [await task for task in asked] == [LOST] * 3
        assert await lab.submit() == LOST

    run(steps())


# --- whatever happens --------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 1200), st.sampled_from([0.01, 0.05, 0.3])),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.004, 0.03, 0.2, 2.2])),
        st.tuples(st.just("answer"), st.sampled_from([None, BROKEN, AWAY, REFUSED, "other"])),
        st.tuples(st.just("leave"), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=STEPS,
    concurrency=st.integers(1, 3),
    inputs=st.integers(1, 4),
    tokens=st.sampled_from([1, 30, 300]),
)
def test_whatever_happens_each_is_answered_once_and_no_call_is_over_budget(
    run, steps, concurrency, inputs, tokens
):
    async def play():
        lab = Lab(concurrency=concurrency, inputs=inputs, tokens=tokens, queue=8)
        await lab.start()
        lab.service.result = None
        deadlines, asked = {}, []
        sent = lab.service.embed

        async def embed(texts, *, timeout_s):
            if timeout_s == DEADLINE_S and texts[0] != UTTERANCES[0]:
                cost = sum(_work(text).tokens for text in texts)
                alone = len({text.split(".")[0] for text in texts}) == 1
                assert alone or (len(texts) <= inputs and cost <= tokens)
                assert all(lab.loop.time() < deadlines[text.split(".")[0]] for text in texts)
                flying = sum(not call.reply.done() for call in lab.calls)
                assert flying <= concurrency + 1, "and a trial"
            return await sent(texts, timeout_s=timeout_s)

        lab.service.embed = embed
        for number, (kind, *options) in enumerate(steps):
            if kind == "submit":
                size, within_s = options
                name = f"{number}"
                # Long ones are two texts, and each begins with the name.
                text = f"{name}.{'a' * size}" + (f"\n\n{name}.z" if size > 1000 else "")
                deadlines[name] = lab.loop.time() + within_s
                asked.append(lab.submit(text, within_s=within_s))
            elif kind == "wait":
                await lab.after(options[0])
            elif kind == "answer":
                await lab.settle()
                open_calls = [call for call in lab.calls if not call.reply.done()]
                if open_calls:
                    (result,) = options
                    call = open_calls[0]
                    call.answer(vectors(call.texts, 5) if result == "other" else result)
            elif options[0] < len(asked):
                asked[options[0]].cancel()
        await lab.after(1.0)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, Embedded | asyncio.CancelledError) or outcome in (
                LATE,
                LOST,
                FULL,
            )
        assert lab.events.depth == 0
        await lab.remote.aclose()

    run(play())
