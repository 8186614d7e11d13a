"""Every request that reached Envoy is accounted for, whatever died meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from gateway import CHAT, HOST, ROUTES, Gateway, ask, free_ports, gateway, scenario, until

from extproc.app.audit import Audit, AuditError, compare

pytestmark = pytest.mark.envoy

SEMANTIC = (
    ROUTES
    + """
utterances = ["write a python function", "fix this compiler error"]
"""
)


async def audit(running: Gateway, *, wait_s: float = 15.0) -> Audit:
    admin, metrics = f"http://{HOST}:{running.admin}", running.metrics_url("")
    return await compare(admin, metrics, wait_s=wait_s)


def numbers(found: Audit) -> dict[str, tuple[int, int]]:
    return {check.what: (check.envoy, check.sidecar) for check in found.checks}


async def burst(running: Gateway, count: int, **more: object) -> list[int]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(
        base_url=running.client.base_url, timeout=60, limits=limits
    ) as client:
        answers = await asyncio.gather(
            *(client.post(CHAT, json=ask(f"question {number}", **more)) for number in range(count)),
        )
    return [answer.status_code for answer in answers]


async def leave_early(running: Gateway, count: int) -> None:
    async def one() -> None:
        with contextlib.suppress(httpx.TimeoutException):
            await running.client.post(CHAT, json=ask(), timeout=0.1)

    await asyncio.gather(*(one() for _ in range(count)))


async def odd_connections(running: Gateway) -> None:
    """What no HTTP client sends: torn heads, other protocols, three requests at once."""
    for data in (
        b"POST /v1",
        b"\x16\x03\x01\x02\x00hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nno colon\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense",
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 3,
    ):
        _reader, writer = await asyncio.open_connection(HOST, running.listen)
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@scenario
async def test_difference_is_0_after_bursts_faults_leavers_and_kills() -> None:
    async with gateway(SEMANTIC) as running:
        assert set(await burst(running, 300)) == {200}
        await running.fault("primary", "hang")
        await leave_early(running, 20)
        await running.fault("primary", "5xx")
        assert set(await burst(running, 50)) == {200}
        await running.fault("primary", None)
        await odd_connections(running)
        whole = await audit(running)
        assert whole.adds_up, whole
        assert whole.is_quiet
        assert await running.metric("pointsman_requests_unseen_total") == 0

        worker = worker_pids(running)[0]
        os.kill(worker, signal.SIGKILL)
        assert set(await burst(running, 50)) == {200}
        after_worker = await audit(running)
        assert after_worker.adds_up, after_worker
        counted = numbers(after_worker)["requests"][0]

        # Killed with requests in flight, dead for 30 more, and back: a new process, counters at 0.
        crowd = asyncio.create_task(burst(running, 60))
        await until(lambda: running.upstreams["primary"].seen, within_s=5)
        running.kill_sidecar()
        assert set(await crowd) == {200}
        assert set(await burst(running, 30)) == {200}
        await running.start_sidecar()
        assert set(await burst(running, 40)) == {200}
        back = await audit(running)
        assert back.adds_up, back
        assert numbers(back)["requests"][0] == counted + 130
        bypassed = await running.metric("pointsman_requests_unseen_total", cause="bypassed")
        assert bypassed >= 30
        assert await running.metric("pointsman_account_offset", of="requests") >= counted
        # And once more: what the second run found unseen, the third doesn't find again.
        running.kill_sidecar()
        await running.start_sidecar()
        await running.chat()
        again = await audit(running)
        assert again.adds_up, again
        assert await running.metric("pointsman_requests_unseen_total") == 0


def worker_pids(running: Gateway) -> list[int]:
    assert running.sidecar is not None
    children = subprocess.run(
        ["ps", "-ww", "--no-headers", "-o", "pid,args", "--ppid", str(running.sidecar.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [int(line.split()[0]) for line in children if "worker" in line]


@scenario
async def test_sidecar_too_slow_to_answer_is_accounted_for() -> None:
    async with gateway() as running:
        await running.chat()
        assert running.sidecar is not None
        running.sidecar.send_signal(signal.SIGSTOP)
        try:
            assert set(await burst(running, 20)) == {200}
        finally:
            running.sidecar.send_signal(signal.SIGCONT)
        found = await audit(running)
        assert found.adds_up, found
        # Its records waited in the socket, so nothing is unseen; the decisions are bypassed ones.
        assert numbers(found)["bypassed"] == (20, 20)
        assert await running.metric("pointsman_requests_unseen_total") == 0


@scenario
async def test_envoy_replaced_under_a_living_sidecar_starts_a_new_account() -> None:
    async with gateway() as running:
        assert set(await burst(running, 20)) == {200}
        assert (await audit(running)).adds_up
        assert running.envoy is not None
        running.envoy.kill()
        running.envoy.wait()
        await running.start_envoy()
        assert set(await burst(running, 5)) == {200}
        found = await audit(running)
        assert found.adds_up, found
        assert numbers(found)["requests"] == (5, 5)
        assert await running.metric("pointsman_requests_total", outcome="served") == 25


@scenario
async def test_command_prints_the_sums_and_ends_with_0_or_names_who_does_not_answer() -> None:
    async with gateway() as running:
        await running.chat()
        status, out, _ = await command(running, "--json")
        assert (status, json.loads(out)["adds_up"]) == (0, True)
        status, out, _ = await command(running)
        assert "every request is accounted for" in out
        running.kill_sidecar()
        status, out, err = await command(running)
        assert (status, out) == (1, "")
        assert "no metrics from" in err


async def command(running: Gateway, *more: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.cli", "audit", "--config", str(running.config_path)),
        *more,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@scenario
async def test_nobody_there_is_an_error_of_its_own() -> None:
    port = free_ports(1)[0]
    with pytest.raises(AuditError, match="no counters"):
        await compare(f"http://{HOST}:{port}", f"http://{HOST}:{port}", wait_s=1)
