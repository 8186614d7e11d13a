"""Decisions a second through Envoy, gRPC and the pool, against the bare encoder in a tight loop.

    python bench/decisions.py [--seconds 5] [--rounds 3] [--workers N] [--words 20 150]

The bare encoder runs in as many processes as the pool has workers, on the same machine for the same
time, with nothing else to do; the path is asked in a closed loop at c = 16 and 32. Both in turn, so
that both meet the same noise; every prompt is new, so no cache helps. Bounded by --seconds and --rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy, as in a worker

import rig
from loadgen import Job

from extproc.embedding.cores import default_workers
from extproc.embedding.encoder import Encoder
from extproc.embedding.model import default_cache_dir, ensure_model

CONNECTIONS = (16, 32)
CPU_OF = ("worker", "sidecar", "envoy", "generator")
ENOUGH_A_SECOND = 3000
"""More prompts than anything here can decide in a second, so that none comes twice."""
PATIENT = 'deadline = "4500ms"'
"""A closed loop queues up to 32 deep, and every decision is to be the full encoder's."""


# --- the bare encoder ---------------------------------------------------------------------------------


def bare() -> None:
    """A child: for each line `SECONDS WORDS SEED` on stdin, the number of texts embedded in that time."""
    encoder = Encoder(ensure_model(None, cache_dir=default_cache_dir(os.environ), progress=rig.say))
    for line in sys.stdin:
        seconds, words, seed = line.split(maxsplit=2)
        texts = itertools.cycle(rig.prompts(ENOUGH_A_SECOND, int(words), seed))
        for text in itertools.islice(texts, 50):
            encoder.encode(text)
        print("ready", flush=True)
        sys.stdin.readline()  # all start together
        done, end = 0, time.perf_counter() + float(seconds)
        while time.perf_counter() < end:
            encoder.encode(next(texts))
            done += 1
        print(done, flush=True)


class Bare:
    """`workers` children. Mutable: `_children`."""

    def __init__(self, workers: int) -> None:
        argv = [sys.executable, __file__, "--bare"]
        pipe = subprocess.PIPE
        self._children = [
            subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) for _ in range(workers)
        ]

    def per_second(self, seconds: float, words: int, seed: str) -> float:
        for number, child in enumerate(self._children):
            self._tell(child, f"{seconds} {words} {seed} {number}")
        for child in self._children:
            assert child.stdout.readline() == "ready\n"
        for child in self._children:
            self._tell(child, "go")
        return sum(int(child.stdout.readline()) for child in self._children) / seconds

    @staticmethod
    def _tell(child: subprocess.Popen[str], line: str) -> None:
        child.stdin.write(line + "\n")
        child.stdin.flush()

    def close(self) -> None:
        for child in self._children:
            child.stdin.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


# --- side by side -------------------------------------------------------------------------------------


@contextlib.contextmanager
def both(directory: Path, workers: int) -> Iterator[tuple[Bare, rig.Server]]:
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(rig.scripted_upstream(directory / "upstream.log"))
        router = f"{PATIENT}\nworkers = {workers}"
        server = rig.gateway(directory, "gateway", upstream=upstream, router=router)
        stack.enter_context(rig.running(server))
        yield stack.enter_context(contextlib.closing(Bare(workers))), server


def through_path(
    server: rig.Server, *, connections: int, seconds: float, words: int, seed: str
) -> dict[str, object]:
    """Only decisions of the full encoder count."""
    texts = rig.prompts(round(ENOUGH_A_SECOND * seconds), words, seed)
    job = Job(
        port=server.port,
        path="/route",
        bodies=[rig.route_body(text) for text in texts],
        connections=connections,
        seconds=seconds,
    )
    before, children_before = server.cpu_seconds(), os.times().children_user
    found = rig.load(job)
    spent = {part: at - before[part] for part, at in server.cpu_seconds().items()}
    spent["generator"] = os.times().children_user - children_before
    others = sum(n for reason, n in found.reasons.items() if reason.startswith("degraded"))
    full = max(0, found.answered - others)
    per_second = round(found.per_second * full / max(1, found.answered), 1)
    cpu_us = {part: round(each / found.sent * 1e6) for part, each in spent.items()}
    return dataclasses.asdict(found) | {
        "per_second": per_second,
        "not_full": found.sent - full,
        "cpu_us": cpu_us,
    }


def measure(bare_encoder: Bare, server: rig.Server, arguments: argparse.Namespace) -> list[dict]:
    rows = []
    seconds = arguments.seconds
    for words in arguments.words:
        through_path(server, connections=16, seconds=1, words=words, seed=f"warm {words}")
        bare_runs: list[float] = []
        path_runs: dict[int, list[dict]] = {each: [] for each in CONNECTIONS}
        for number in range(arguments.rounds):
            seed = f"{words} {number}"
            bare_runs.append(bare_encoder.per_second(seconds, words, seed))
            for connections, runs in path_runs.items():
                found = through_path(
                    server,
                    connections=connections,
                    seconds=seconds,
                    words=words,
                    seed=f"{seed} {connections}",
                )
                runs.append(found)
        for connections, runs in path_runs.items():
            rows.append(row(words, connections, bare_runs, runs))
            rig.say(json.dumps({k: v for k, v in rows[-1].items() if k != "rounds"}))
    return rows


def row(words: int, connections: int, bare_runs: Sequence[float], runs: Sequence[dict]) -> dict:
    """Medians over rounds; the share is the median of each round's own."""
    pairs = list(zip(bare_runs, runs, strict=True))
    return {
        "words": words,
        "connections": connections,
        "bare_per_second": round(statistics.median(bare_runs), 1),
        "path_per_second": statistics.median(run["per_second"] for run in runs),
        "share": round(statistics.median(run["per_second"] / bare for bare, run in pairs), 3),
        "not_full": sum(run["not_full"] for run in runs),
        "p50_ms": statistics.median(run["p50_ms"] for run in runs),
        "p99_ms": statistics.median(run["p99_ms"] for run in runs),
        "cpu_us": {
            part: statistics.median(run["cpu_us"][part] for run in runs)
            for part in runs[0]["cpu_us"]
        },
        "rounds": [{"bare_per_second": bare, **run} for bare, run in pairs],
    }


def as_table(rows: Sequence[dict]) -> str:
    lines = [
        "| Words | c | Bare, a second | Path, a second | Share | p50 | p99 ms | CPU a decision, us * |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['words']} | {r['connections']} | {r['bare_per_second']:,.0f} | {r['path_per_second']:,.0f} "
        f"| {r['share']:.0%} | {r['p50_ms']:.1f} | {r['p99_ms']:.1f} | "
        + " / ".join(f"{r['cpu_us'][p]:.0f}" for p in CPU_OF)
        + " |"
        for r in rows
    ]
    return "\n".join([*lines, "", f"* {' / '.join(CPU_OF)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=default_workers(), help="of the pool")
    parser.add_argument("--words", nargs="+", type=int, default=[20, 150])
    parser.add_argument("--out", type=Path, default=rig.OUT / "decisions.json")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare()
        return
    rig.unwind_on_sigterm()
    before = rig.machine()
    with (
        tempfile.TemporaryDirectory() as directory,
        both(Path(directory), arguments.workers) as (bare_encoder, server),
    ):
        rows = measure(bare_encoder, server, arguments)
    print(as_table(rows))
    document = {"bench": "decisions", "workers": arguments.workers, "seconds": arguments.seconds}
    machine = {"before": dataclasses.asdict(before), "after": dataclasses.asdict(rig.machine())}
    rig.write(arguments.out, {**document, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
