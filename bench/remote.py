"""Decisions through Envoy, gRPC and an embedding service: calls that carry what waits, against one text each.

    python bench/remote.py [--seconds 4] [--rounds 3] [--call-ms 5] [--token-us 10]

The service is scripted: one call at a time, as a GPU works, and each takes --call-ms and --token-us for
each token of its texts (a quarter of their characters). Its vectors mean nothing. Both gateways run the
product's defaults but for `max_batch`; closed loop, in turn, every prompt new. Bounded by its options.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import rig
from aiohttp import web
from loadgen import Job

BATCHES = {"batches of 32": 32, "one text a call": 1}
CONNECTIONS = (1, 16, 64)
WORDS = 20
DIMENSION = 1024
ENOUGH_A_SECOND = 3000
CHARS_A_TOKEN = 4


# --- the scripted service -----------------------------------------------------------------------------


class Scripted:
    """Mutable: counts, and the lock that is the GPU."""

    def __init__(self, call_s: float, token_s: float) -> None:
        self._call_s, self._token_s = call_s, token_s
        self._gpu = asyncio.Lock()
        self._counts = {"calls": 0, "texts": 0, "busy_s": 0.0}

    async def embeddings(self, request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        cost_s = self._call_s + self._token_s * sum(map(len, texts)) / CHARS_A_TOKEN
        async with self._gpu:
            await asyncio.sleep(cost_s)
        self._counts["calls"] += 1
        self._counts["texts"] += len(texts)
        self._counts["busy_s"] += cost_s
        data = [{"index": at, "embedding": _vector(text)} for at, text in enumerate(texts)]
        return web.json_response({"object": "list", "data": data})

    async def counts(self, _: web.Request) -> web.Response:
        return web.json_response(self._counts)


def _vector(text: str) -> str:
    """1,024 numbers that depend on the text alone."""
    vector = np.random.default_rng(zlib.crc32(text.encode())).standard_normal(DIMENSION, np.float32)
    return base64.b64encode(vector.tobytes()).decode()


def serve(port: int, call_s: float, token_s: float) -> None:
    scripted = Scripted(call_s, token_s)
    app = web.Application(client_max_size=1 << 24)
    app.add_routes(
        [
            web.post("/v1/embeddings", scripted.embeddings),
            web.get("/counts", scripted.counts),
        ]
    )
    web.run_app(app, host=rig.HOST, port=port, print=None, access_log=None)


class Service:
    def __init__(self, port: int) -> None:
        self._base = f"http://{rig.HOST}:{port}"
        self.url = f"{self._base}/v1/embeddings"

    def counts(self) -> Mapping[str, float]:
        with urllib.request.urlopen(f"{self._base}/counts", timeout=10) as answer:
            found: Mapping[str, float] = json.loads(answer.read())
            return found


@contextlib.contextmanager
def service(arguments: argparse.Namespace) -> Iterator[Service]:
    (port,) = rig.free_ports(1)
    costs = ["--call-ms", str(arguments.call_ms), "--token-us", str(arguments.token_us)]
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(port), *costs])
    try:
        found = Service(port)
        deadline = time.monotonic() + rig.START_S
        while True:
            with contextlib.suppress(OSError):
                found.counts()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the scripted service does not serve")
            time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait()


# --- side by side -------------------------------------------------------------------------------------


def once(
    server: rig.Server, scripted: Service, *, connections: int, seconds: float, seed: str
) -> dict[str, float]:
    texts = rig.prompts(round(ENOUGH_A_SECOND * seconds), WORDS, seed)
    bodies = [rig.route_body(text) for text in texts]
    job = Job(
        port=server.port, path="/route", bodies=bodies, connections=connections, seconds=seconds
    )
    before = scripted.counts()
    found = rig.load(job)
    counts = {key: at - before[key] for key, at in scripted.counts().items()}
    if found.lost:
        rig.say(f"{seed}: {found.ends}")
    degraded = sum(n for reason, n in found.reasons.items() if reason.startswith("degraded"))
    share = 1 - degraded / max(1, found.answered)
    return {
        "per_second": found.per_second,
        "by_the_service_per_second": found.per_second * share,
        "by_the_service": share,
        "lost": found.lost,
        "p50_ms": found.p50_ms,
        "p95_ms": found.p95_ms,
        "texts_a_call": counts["texts"] / max(1, counts["calls"]),
        "service_busy": counts["busy_s"] / seconds,
    }


def measure(
    servers: Mapping[str, rig.Server], scripted: Service, arguments: argparse.Namespace
) -> list[dict]:
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    for server in servers.values():
        once(server, scripted, connections=16, seconds=1, seed="warm")
    for number in range(arguments.rounds):
        for connections in CONNECTIONS:
            for name, server in servers.items():
                seed = f"{number} {connections} {name}"
                runs.setdefault((connections, name), []).append(
                    once(
                        server,
                        scripted,
                        connections=connections,
                        seconds=arguments.seconds,
                        seed=seed,
                    )
                )
                rig.say(f"{seed}: {json.dumps(runs[connections, name][-1])}")
    return [
        {
            "connections": connections,
            "calls": name,
            **{key: round(statistics.median(each[key] for each in own), 3) for key in own[0]},
            "rounds": own,
        }
        for (connections, name), own in runs.items()
    ]


def as_table(rows: Sequence[dict]) -> str:
    lines = [
        "| c | Calls | Decisions a second | Of them by the service | p50 | p95 ms | Lost | Texts a call |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['connections']} | {r['calls']} | {r['per_second']:,.0f} "
        f"| {r['by_the_service_per_second']:,.0f}, {r['by_the_service']:.0%} "
        f"| {r['p50_ms']:.1f} | {r['p95_ms']:.1f} | {r['lost']:.0f} | {r['texts_a_call']:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--call-ms", type=float, default=5.0)
    parser.add_argument("--token-us", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=rig.OUT / "remote.json")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.call_ms / 1e3, arguments.token_us / 1e6)
        return
    rig.unwind_on_sigterm()
    before = rig.machine()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = stack.enter_context(rig.scripted_upstream(directory / "upstream.log"))
        scripted = stack.enter_context(service(arguments))
        servers = {}
        for name, size in BATCHES.items():
            keys = f'[router.encoder]\nurl = "{scripted.url}"\nmax_batch = {size}'
            server = rig.gateway(directory, f"gateway-{size}", upstream=upstream, router=keys)
            servers[name] = stack.enter_context(rig.running(server))
        rows = measure(servers, scripted, arguments)
    print(as_table(rows))
    machine = {"before": dataclasses.asdict(before), "after": dataclasses.asdict(rig.machine())}
    conditions = {key: getattr(arguments, key) for key in ("seconds", "call_ms", "token_us")}
    rig.write(arguments.out, {"bench": "remote", **conditions, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
