"""What Envoy plus the sidecar add to a request whose model is explicit, beside plain Envoy.

Closed loop at c connections, plain and full chain in turn, so that both meet the same noise; the
figure is the median of the rounds. Loopback only; bounded by --seconds and --rounds.

    python bench/overhead.py [--seconds 4] [--rounds 3] [--out bench/out/overhead.json]

With --secured the question is another: the full chain with TLS and clients' keys beside the full chain
without; last with a connection for each request, handshake included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path

import trustme
import uvloop
from rig import HOST, cpu_seconds_of, free_ports

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


SECURED = """
[server.tls]
cert_file = "{folder}/tls.crt"
key_file = "{folder}/tls.key"
[server.auth]
keys_file = "{folder}/keys"
"""
KEY = "sk-bench-0123456789abcdef"
KEYS = 100


@dataclass(frozen=True)
class Way:
    """How a contender is reached."""

    port: int
    pid: int
    tls: ssl.SSLContext | None = None

    def connect(self) -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_connection(HOST, self.port, ssl=self.tls)

    @property
    def request(self) -> bytes:
        key = f"authorization: Bearer {KEY}\r\n" if self.tls else ""
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}:{self.port}\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
        ).encode() + BODY


def secure(folder: Path) -> ssl.SSLContext:
    """Certificate and keys into a folder; what trusts them."""
    authority = trustme.CA()
    leaf = authority.issue_cert(HOST)
    leaf.private_key_pem.write_to_path(str(folder / "tls.key"))
    (folder / "tls.crt").write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
    others = "".join(f"client-{n} sk-other-{n:020}\n" for n in range(KEYS - 1))
    (folder / "keys").write_text(f"{others}bench {KEY}\n")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


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


async def answers(way: Way) -> None:
    """Wait until the way is open."""
    for _ in range(600):
        with contextlib.suppress(OSError, AssertionError, asyncio.IncompleteReadError):
            reader, writer = await way.connect()
            try:
                return await ask(reader, writer, way.request)
            finally:
                writer.close()
        await asyncio.sleep(0.1)
    raise SystemExit(f"nothing answers on port {way.port}")


async def load(
    way: Way, connections: int, seconds: float, *, fresh: bool = False
) -> dict[str, float]:
    """`fresh`: a connection for each request, and its time in that of the request."""
    request, latencies = way.request, list[float]()
    before = cpu_seconds_of(way.pid)
    end = time.perf_counter() + seconds

    async def one() -> None:
        reader, writer = await way.connect()
        while (begun := time.perf_counter()) < end:
            if fresh:
                writer.close()
                reader, writer = await way.connect()
            await ask(reader, writer, request)
            latencies.append(time.perf_counter() - begun)
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    latencies.sort()
    after = cpu_seconds_of(way.pid)
    cpu = {
        f"{part}_cpu_us": (after[part] - before[part]) / len(latencies) * 1e6
        for part in ("envoy", "sidecar")
    }

    def at(share: float) -> float:
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e3

    return {"rps": len(latencies) / seconds, "p50_ms": at(0.5), "p99_ms": at(0.99), **cpu}


async def measure(ways: dict[str, Way], seconds: float, rounds: int) -> list[dict[str, object]]:
    """The second of two beside the first."""
    rows = []
    for way in ways.values():
        await answers(way)
        await load(way, 16, 1.0)  # warm connections, caches, branch predictors
    plans = [(1, False), (16, False), (64, False)]
    if "secured" in ways:
        plans.append((16, True))
    for connections, fresh in plans:
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                taken[name].append(await load(way, connections, seconds, fresh=fresh))
        row: dict[str, object] = {"connections": connections, "fresh": fresh}
        for name, runs in taken.items():
            row[name] = {key: round(statistics.median(r[key] for r in runs), 3) for key in runs[0]}
        plain, chain = taken.values()
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
    parser.add_argument("--secured", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    name = "secured" if arguments.secured else "overhead"
    out = arguments.out or Path(f"bench/out/{name}.json")
    upstream, plain, plain_admin, listen, admin, metrics, *more = free_ports(9)
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
        chain = stack.enter_context(
            running(python, "-m", "extproc.cli", "up", "--config", str(config))
        )
        if arguments.secured:
            folder, secured = Path(directory), Path(directory, "secured.toml")
            trusted = secure(folder)
            text = CHAIN.format(
                host=HOST, listen=more[0], admin=more[1], metrics=more[2], upstream=upstream
            )
            secured.write_text(text + SECURED.format(folder=folder))
            other = stack.enter_context(
                running(python, "-m", "extproc.cli", "up", "--config", str(secured))
            )
            ways = {
                "chain": Way(listen, chain.pid),
                "secured": Way(more[0], other.pid, trusted),
            }
        else:
            envoy = stack.enter_context(
                running(str(find_envoy()), "-c", str(bootstrap), "--use-dynamic-base-id")
            )
            ways = {"plain": Way(plain, envoy.pid), "chain": Way(listen, chain.pid)}
        rows = uvloop.run(measure(ways, arguments.seconds, arguments.rounds))
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {"bench": name, "cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
