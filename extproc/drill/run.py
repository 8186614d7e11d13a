"""Runs a drill: constant load, fault, mending, and a look at the circuit all the time; it judges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Final

from extproc.core.circuit import State
from extproc.drill.events import Event, Look, Made, Mended, Sent, Totals
from extproc.drill.plan import Setting
from extproc.drill.target import DrillError, Target

LOOK_EVERY_S: Final = 0.05
_SETTLES_WITHIN_S: Final = 3.0
_SETTLE_EVERY_S: Final = 0.1


class Drill:
    """One drill, to be run once.

    Mutable: the `events` so far, the `_first` and the `_last` look among them, `_clients` (one task
    a request), and `_broken`: whether the upstream may have a fault of ours.
    """

    def __init__(
        self,
        setting: Setting,
        target: Target,
        *,
        clock: Callable[[], float],
        tell: Callable[[Event], None],
    ) -> None:
        """`clock`: seconds since about now; `tell` hears of every event as it comes."""
        self._setting = setting
        self._target = target
        self._clock = clock
        self._tell = tell
        self._first: Look | None = None
        self._last: Look | None = None
        self._clients: list[asyncio.Task[None]] = []
        self._broken = False
        self.events: list[Event] = []

    async def run(self) -> None:
        """Raise DrillError. However it ends, the upstream is mended and no task is left."""
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._setting.at_most_s):
                before = await self._totals(quiet)
                acts, load, watch = (
                    asyncio.create_task(each) for each in (self._act(), self._load(), self._watch())
                )
                tasks += [acts, load, watch]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # the load and the watch end only by failing
                load.cancel()
                await asyncio.wait(self._clients)
                for client in self._clients:
                    client.result()
                sent = len(self._clients)
                await self._totals(lambda _, now: now.requests - before.requests >= sent)
                for visit in await self._target.visits():
                    self._record(visit)
        except TimeoutError:
            limit_s = self._setting.at_most_s
            raise DrillError(f"the drill was not over within {limit_s:.0f} s") from None
        finally:
            tasks += self._clients
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._broken:
                await self._target.mend()

    def _record(self, event: Event) -> None:
        if isinstance(event, Look):
            self._first, self._last = self._first or event, event
        self.events.append(event)
        self._tell(event)

    async def _act(self) -> None:
        setting = self._setting
        # Between two arrivals, so that each is clearly before or after.
        await asyncio.sleep(setting.calm_s + 0.5 / setting.rps)
        begun_s = self._clock()
        self._broken = True  # from here on it must be mended, whatever the answer
        await self._target.make_fault()
        self._record(Made(begun_s, self._clock()))
        if not setting.opens:
            await asyncio.sleep(setting.stays_closed_s)
        elif await self._until(lambda: self._entered_open() > 0, within_s=setting.opens_within_s):
            await self._until(
                lambda: self._entered_open() > 1, within_s=setting.trial_fails_within_s
            )
            await asyncio.sleep(setting.calm_s)
        begun_s = self._clock()
        await self._target.mend()
        self._broken = False
        self._record(Mended(begun_s, self._clock()))
        await self._until(
            lambda: self._last is not None and self._last.state is State.CLOSED,
            within_s=setting.back_within_s,
        )
        await asyncio.sleep(setting.calm_s)

    async def _load(self) -> None:
        """Constant arrivals: a slow answer delays no other request, and no measurement hides it."""
        begun_s = self._clock()
        for serial in count():
            due_s = begun_s + serial / self._setting.rps
            await asyncio.sleep(due_s - self._clock())
            self._record(Sent(serial, due_s))
            self._clients.append(asyncio.create_task(self._ask(serial, due_s)))

    async def _ask(self, serial: int, due_s: float) -> None:
        self._record(await self._target.ask(serial, due_s=due_s))

    async def _watch(self) -> None:
        while True:
            self._record(await self._target.look())
            await asyncio.sleep(LOOK_EVERY_S)

    async def _until(self, condition: Callable[[], bool], *, within_s: float) -> bool:
        until_s = self._clock() + within_s
        while not condition():
            if self._clock() > until_s:
                return False
            await asyncio.sleep(LOOK_EVERY_S)
        return True

    def _entered_open(self) -> int:
        """How often, since the first look."""
        if self._first is None or self._last is None:
            return 0
        return self._last.entered[State.OPEN] - self._first.entered[State.OPEN]

    async def _totals(self, settled: Callable[[Totals, Totals], bool]) -> Totals:
        """The counts once two readings of them show that they have settled, or time is up."""
        until_s = self._clock() + _SETTLES_WITHIN_S
        last = await self._target.totals()
        while True:
            await asyncio.sleep(_SETTLE_EVERY_S)
            now = await self._target.totals()
            if settled(last, now) or self._clock() > until_s:
                self._record(now)
                return now
            last = now


def quiet(before: Totals, now: Totals) -> bool:
    return before.requests == now.requests and before.envoy_requests == now.envoy_requests
