"""What Envoy plus the sidecar add to a request whose model is explicit, beside plain Envoy.

Closed loop at c connections, plain and full chain in turn, so that both meet the same noise; the
figure is the median of the rounds. Loopback only; bounded by --seconds and --rounds.

    python bench/overhead.py [--seconds 4] [--rounds 3] [--out bench/out/overhead.json]
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
from collections.abc import Iterator
from pathlib import Path

import uvloop
from rig import HOST, free_ports

from extproc.supervise import find_envoy

BODY = json.dumps(
    {"model": "primary", "messages": [{"role": "user", "content": "write a haiku about rain"}]}
).encode()
PLAIN = """
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {admin}}}}}}}
static_resources:
  listeners:
  - name: plain
    address: {{socket_address: {{address: 127.0.0.1, port_value: {listen}}}}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: plain
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
          route_config:
            virtual_hosts:
            - {{name: v, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: upstream}}}}]}}
  clusters:
  - name: upstream
    type: STATIC
    load_assignment: {{cluster_name: upstream, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}}}]}}]}}
"""
CHAIN = """
[server]
listen = "{host}:{listen}"
[admin]
listen = "{host}:{admin}"
[metrics]
listen = "{host}:{metrics}"
[upstream.primary]
base_url = "http://{host}:{upstream}"
model = "primary-model"
"""


@contextlib.contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    await reader.readexactly(length)


async def answers(port: int) -> None:
    """Wait until the way is open."""
    for _ in range(600):
        with contextlib.suppress(OSError, AssertionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                return await ask(reader, writer, request_to(port))
            finally:
                writer.close()
        await asyncio.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


def request_to(port: int) -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    ).encode() + BODY


async def load(port: int, connections: int, seconds: float) -> dict[str, float]:
    request, latencies = request_to(port), list[float]()
    end = time.perf_counter() + seconds

    async def one() -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        while (begun := time.perf_counter()) < end:
            await ask(reader, writer, request)
            latencies.append(time.perf_counter() - begun)
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    latencies.sort()

    def at(share: float) -> float:
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3

    return {"rps": len(latencies) / seconds, "p50_ms": at(0.5), "p99_ms": at(0.99)}


async def measure(ports: dict[str, int], seconds: float, rounds: int) -> list[dict[str, object]]:
    rows = []
    for port in ports.values():
        await answers(port)
        await load(port, 16, 1.0)  # warm connections, caches, branch predictors
    for connections in (1, 16, 64):
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
        for _ in range(rounds):
            for name, port in ports.items():
                taken[name].append(await load(port, connections, seconds))
        row: dict[str, object] = {"connections": connections}
        for name, runs in taken.items():
            row[name] = {key: round(statistics.median(r[key] for r in runs), 3) for key in runs[0]}
        plain, chain = taken["plain"], taken["chain"]
        row["rps_share"] = round(
            statistics.median(c["rps"] / p["rps"] for c, p in zip(chain, plain, strict=True)), 3
        )
        row["added_p50_ms"] = round(
            statistics.median(c["p50_ms"] - p["p50_ms"] for c, p in zip(chain, plain, strict=True)),
            3,
        )
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/out/overhead.json"))
    arguments = parser.parse_args()
    upstream, plain, plain_admin, listen, admin, metrics = free_ports(6)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        bootstrap, config = Path(directory, "plain.yaml"), Path(directory, "pointsman.toml")
        bootstrap.write_text(PLAIN.format(admin=plain_admin, listen=plain, upstream=upstream))
        config.write_text(
            CHAIN.format(host=HOST, listen=listen, admin=admin, metrics=metrics, upstream=upstream)
        )
        python = sys.executable
        stack.enter_context(
            running(python, "-m", "extproc.demo", "--listen", f"{HOST}:{upstream}=primary")
        )
        stack.enter_context(
            running(str(find_envoy()), "-c", str(bootstrap), "--use-dynamic-base-id")
        )
        stack.enter_context(running(python, "-m", "extproc.cli", "up", "--config", str(config)))
        ports = {"plain": plain, "chain": listen}
        rows = uvloop.run(measure(ports, arguments.seconds, arguments.rounds))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"bench": "overhead", "cores": os.cpu_count(), "rows": rows}
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
