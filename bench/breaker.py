"""A hung primary under a steady load, with the gate and with Envoy's outlier detection alone.

Both gateways run the article's policy shortened (5 failures, 30 s window, --cooldown, 3 trials,
inference_timeout 1 s) over scripted upstreams; "alone" is the same Envoy with its sidecar not
running. Reported: how many requests reached the dead primary, how many clients waited for it, time
from the fault to the first fast answer, latency while it is down. Loopback; bounded by --seconds.

    python bench/breaker.py [--seconds 60] [--rps 10] [--cooldown 10] [--out bench/out/breaker.json]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from rig import HOST, free_ports

from extproc.config import load
from extproc.demo.faults import Fault, FaultKind
from extproc.demo.upstream import ScriptedUpstream
from extproc.envoyconf import render
from extproc.supervise import find_envoy

TIMEOUT_S = 1.0
CONFIG = """
[server]
listen = "{host}:{listen}"
[admin]
listen = "{host}:{admin}"
[metrics]
listen = "{host}:{metrics}"
[extproc]
socket = "{directory}/x.sock"
[upstream.primary]
base_url = "{primary}"
model = "primary-model"
inference_timeout = "1s"
[upstream.fallback]
base_url = "{fallback}"
model = "fallback-model"
[circuit_breaker]
failure_threshold = 5
window = "30s"
cooldown = "{cooldown}s"
half_open_max_requests = 3
"""
BODY = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}


async def answers(client: httpx.AsyncClient, url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get(url)).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


async def one(*, gate: bool, seconds: float, rps: float, cooldown: float) -> dict[str, object]:
    primary, fallback = ScriptedUpstream("primary"), ScriptedUpstream("fallback")
    await primary.start()
    await fallback.start()
    listen, admin, metrics = free_ports(3)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        config, bootstrap = Path(directory, "pointsman.toml"), Path(directory, "envoy.yaml")
        config.write_text(
            CONFIG.format(
                host=HOST,
                listen=listen,
                admin=admin,
                metrics=metrics,
                directory=directory,
                primary=primary.base_url,
                fallback=fallback.base_url,
                cooldown=cooldown,
            )
        )
        bootstrap.write_text(render(load(config, environ=None)))

        def start(*argv: str) -> None:
            process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        async with httpx.AsyncClient(base_url=f"http://{HOST}:{listen}", timeout=30) as client:
            if gate:
                start(sys.executable, "-m", "extproc.cli", "serve", "--config", str(config))
                await answers(client, f"http://{HOST}:{metrics}/readyz")
            start(str(find_envoy()), "-c", str(bootstrap), "--use-dynamic-base-id", "-l", "off")
            await answers(client, f"http://{HOST}:{admin}/ready")
            for _ in range(20):
                await client.post("/v1/chat/completions", json=BODY)

            direct = []
            for _ in range(100):
                begun = time.perf_counter()
                await client.post("/v1/chat/completions", json=BODY | {"model": "fallback"})
                direct.append(time.perf_counter() - begun)

            primary.clear_seen()
            await primary.set_fault(Fault(kind=FaultKind.HANG))
            fault_at = time.perf_counter()
            taken: list[tuple[float, float, int]] = []

            async def ask(due: float) -> None:
                response = await client.post("/v1/chat/completions", json=BODY)
                now = time.perf_counter()
                taken.append((due - fault_at, now - due, response.status_code))

            tasks = []
            for index in range(round(seconds * rps)):
                due = fault_at + index / rps
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(ask(due)))
            await asyncio.gather(*tasks)
        reached = len(primary.seen)
    await primary.aclose()
    await fallback.aclose()
    fast = sorted(took for _, took, _ in taken if took < TIMEOUT_S / 2)
    first_fast = min((at for at, took, _ in taken if took < TIMEOUT_S / 2), default=None)
    return {
        "gate": gate,
        "requests": len(taken),
        "answered_200": sum(status == 200 for *_, status in taken),
        "reached_primary": reached,
        "clients_that_waited": sum(took >= TIMEOUT_S / 2 for _, took, _ in taken),
        "first_fast_answer_s": None if first_fast is None else round(first_fast, 2),
        "open_p50_ms": round(statistics.median(fast) * 1e3, 2),
        "open_p99_ms": round(fast[int(0.99 * (len(fast) - 1))] * 1e3, 2),
        "direct_to_fallback_p50_ms": round(statistics.median(direct) * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rps", type=float, default=10.0)
    parser.add_argument("--cooldown", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("bench/out/breaker.json"))
    given = parser.parse_args()
    rows = []
    for gate in (False, True):
        row = asyncio.run(
            one(gate=gate, seconds=given.seconds, rps=given.rps, cooldown=given.cooldown)
        )
        print(json.dumps(row), flush=True)
        rows.append(row)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"bench": "breaker", "cores": os.cpu_count(), "rows": rows}
    given.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
