"""One load on one port of this machine, from a process of its own; it knows no gateway.

    python bench/loadgen.py < JOB.json > RESULT.json

Every request ends in exactly one way: a status, `timeout`, or the name of a connection error. Arrivals
of an open loop keep their schedule whatever the server does, and latency counts from the scheduled
send: a closed loop would wait with the server and so never see it stand still.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

HOST = "127.0.0.1"
LEAD_S = 0.1
"""From here to the first arrival: the requests are built before the clock runs."""
REASON = re.compile(rb'"reason": ?"(\w+)"')
ROUTE_HEADER = re.compile(rb"\r\nx-pointsman-route: ([\w.-]+)", re.IGNORECASE)
REASON_HEADER = re.compile(rb"\r\nx-pointsman-reason: (\w+)", re.IGNORECASE)
FALLBACK_HEADER = re.compile(rb"\r\nx-pointsman-fallback: (\w+)", re.IGNORECASE)
now = time.perf_counter
"""Not the loop's clock: uvloop's counts whole milliseconds and stands still within a turn."""
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """`connections` > 0: a closed loop for `seconds`; else one request a body, `rate` a second (0: all
    at once)."""

    port: int
    path: str
    bodies: Sequence[str]
    rate: float = 0.0
    connections: int = 0
    seconds: float = 0.0
    timeout_s: float = 5.0
    tell_routes: bool = False
    """Say of each body, in the order of arrivals, where it was sent and why."""


@dataclass(frozen=True)
class Result:
    """Latencies in ms; a lost request counts with the time-out, so that losing never looks fast."""

    sent: int
    lost: int
    ends: dict[str, int]
    reasons: dict[str, int]
    """How the answers say that they were decided; rivals say nothing, and are not counted here."""
    fallbacks: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    per_second: float
    send_lag_ms: float
    """How late the generator itself was at worst: beyond a few ms, distrust the latencies."""
    routes: list[tuple[str, str]]
    """Route and reason of each body; empty strings where there was no answer."""

    @property
    def answered(self) -> int:
        return self.sent - self.lost


class Connection(asyncio.Protocol):
    """Keep-alive, one request at a time. Mutable: `_seen`, `_waiter`, `usable`."""

    def __init__(self) -> None:
        self._seen = b""
        self._waiter: asyncio.Future[bytes] | None = None
        self.usable = True

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if self._waiter and not self._waiter.done() and _is_whole(self._seen):
            answer, self._seen = self._seen, b""
            self._waiter.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._waiter and not self._waiter.done():
            self._waiter.set_exception(error or ConnectionError("closed without an answer"))

    async def ask(self, request: bytes) -> bytes:
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiter

    def close(self) -> None:
        self.usable = False
        self._transport.abort()


def _is_whole(answer: bytes) -> bool:
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    found = LENGTH.search(answer, 0, end + 2)
    if found:
        return len(answer) >= end + 4 + int(found[1])
    return answer.endswith(b"0\r\n\r\n")  # chunked, and nothing is pipelined behind it


class Load:
    """Mutable: `_idle` connections, and what ended: `_ends`, `_latencies`, `_answers`, `_routes`, `_lag_s`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = [_request(job, body) for body in job.bodies]
        self._idle: list[Connection] = []
        self._ends: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._answers: list[bytes] = []
        self._routes: list[tuple[str, str]] = []
        self._lag_s = 0.0

    async def run(self) -> Result:
        self._loop = asyncio.get_running_loop()
        begun = now() + LEAD_S
        await (self._closed(begun) if self._job.connections else self._open(begun))
        elapsed_s = now() - begun
        for connection in self._idle:
            connection.close()
        return self._result(elapsed_s)

    async def _open(self, begun: float) -> None:
        rate, tasks = self._job.rate, []
        for number, request in enumerate(self._requests):
            due = begun + (number / rate if rate else 0.0)
            if (wait_s := due - now()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._one(due, request)))
        answers = await asyncio.gather(*tasks)
        if self._job.tell_routes:
            self._routes = [_route_and_reason(answer) for answer in answers]

    async def _closed(self, begun: float) -> None:
        requests = itertools.cycle(self._requests)
        end = begun + self._job.seconds

        async def client() -> None:
            await asyncio.sleep(begun - now())
            while (begun_one := now()) < end:
                await self._one(begun_one, next(requests))

        await asyncio.gather(*(client() for _ in range(self._job.connections)))

    async def _one(self, due: float, request: bytes) -> bytes:
        """Connecting is part of it, as it is for a client."""
        self._lag_s = max(self._lag_s, now() - due)
        connection: Connection | None = None
        try:
            async with asyncio.timeout(due + self._job.timeout_s - now()):
                connection = self._reused() or await self._connect()
                answer = await connection.ask(request)
        except TimeoutError:
            end, answer = "timeout", b""
        except OSError as error:
            end, answer = type(error).__name__, b""
        else:
            end = answer[9:12].decode("latin-1")
        took_s = now() - due
        self._latencies.append(took_s if end == "200" else max(took_s, self._job.timeout_s))
        self._ends[end] += 1
        self._answers.append(answer)
        if connection is not None:
            if answer and connection.usable:
                self._idle.append(connection)
            else:
                connection.close()
        return answer

    def _reused(self) -> Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        _, connection = await self._loop.create_connection(Connection, HOST, self._job.port)
        return connection

    def _result(self, elapsed_s: float) -> Result:
        ordered = sorted(self._latencies)

        def at(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)

        reasons: Counter[str] = Counter()
        for answer in self._answers:
            if found := REASON.search(answer) or REASON_HEADER.search(answer):
                reasons[found[1].decode()] += 1
        answered = self._ends["200"]
        return Result(
            sent=len(ordered),
            lost=len(ordered) - answered,
            ends=dict(self._ends),
            reasons=dict(reasons),
            fallbacks=sum(bool(FALLBACK_HEADER.search(answer)) for answer in self._answers),
            p50_ms=at(0.5),
            p95_ms=at(0.95),
            p99_ms=at(0.99),
            max_ms=at(1.0),
            per_second=round(answered / elapsed_s, 1),
            send_lag_ms=round(self._lag_s * 1e3, 2),
            routes=self._routes,
        )


def _route_and_reason(answer: bytes) -> tuple[str, str]:
    found = ROUTE_HEADER.search(answer), REASON_HEADER.search(answer)
    route, reason = (each[1].decode() if each else "" for each in found)
    return route, reason


def _request(job: Job, body: str) -> bytes:
    raw = body.encode()
    head = (
        f"POST {job.path} HTTP/1.1\r\nhost: {HOST}:{job.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def main() -> None:
    import uvloop  # noqa: PLC0415  what starts this process needs only its types

    job = Job(**json.load(sys.stdin))
    with contextlib.suppress(KeyboardInterrupt):
        json.dump(asdict(uvloop.run(Load(job).run())), sys.stdout)


if __name__ == "__main__":
    main()
