"""Bursts and a steady stream of prompts: the article's gateways and ours, in turn, with the same prompts.

    python bench/burst.py [--rounds 3] [--servers NAME ...] [--scenarios NAME ...] [--words 20 150]

Needs `.venv-bench` (`make bench` creates it). Loopback only. Bounded: a request ends within 5 s, so one
run of everything takes at most 5 minutes a round and server, in practice less than 2.

A request that got no 200 within 5 s is lost, and counts with 5 s in the percentiles. A server that lost
some starts the next run afresh, without the stale work of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rig
from loadgen import Job, Result

from extproc.embedding.model import default_cache_dir, ensure_model

BENCH_PYTHON = rig.HERE.parent / ".venv-bench" / "bin" / "python"
TIMEOUT_S = 5.0
PATIENT = 'deadline = "4500ms"'
FIGURES = ("lost", "p50_ms", "p95_ms", "p99_ms", "full", "fast", "send_lag_ms")
FAST = "degraded_fast"


@dataclass(frozen=True)
class Scenario:
    count: int
    rate: float
    """A second; 0: all at once."""


SCENARIOS = {
    "300 at once": Scenario(300, 0),
    "300 in 10 s": Scenario(300, 30),
    "240/s for 10 s": Scenario(2400, 240),
}


@dataclass(frozen=True)
class Contender:
    """How a server is asked. `process`: which of the running ones; `rival`: handler and encoder."""

    process: str
    path: str = "/route"
    rival: tuple[str, str] | None = None


CONTENDERS = {
    "blocking": Contender("blocking", rival=("blocking", "torch")),
    "to_thread": Contender("to_thread", rival=("to_thread", "torch")),
    "blocking, our model": Contender("blocking int8", rival=("blocking", "int8")),
    "to_thread, our model": Contender("to_thread int8", rival=("to_thread", "int8")),
    "ours": Contender("ours"),
    "ours, whole chat": Contender("ours", path="/v1/chat/completions"),
    "ours, deadline 4.5 s": Contender("ours patient"),
}


def rival_server(directory: Path, name: str, handler: str, encoder: str) -> rig.Server:
    (port,) = rig.free_ports(1)
    routes = directory / "routes.json"
    routes.write_text(json.dumps(rig.utterances()), encoding="utf-8")
    argv = [str(BENCH_PYTHON), str(rig.HERE / "rivals.py"), "--handler", handler]
    argv += ["--encoder", encoder, "--port", str(port), "--routes", str(routes)]
    if encoder == "int8":
        files = ensure_model(None, cache_dir=default_cache_dir(os.environ), progress=rig.say)
        argv += ["--onnx", str(files.onnx), "--tokenizer", str(files.tokenizer)]
        argv += ["--dimension", str(files.dimension)]
    log = directory / f"{name}.log"
    return rig.Server(argv, port, log, {"PYTHONPATH": str(rig.HERE.parent)})


def started(
    stack: contextlib.ExitStack, directory: Path, names: Sequence[str]
) -> dict[str, rig.Server]:
    upstream = stack.enter_context(rig.scripted_upstream(directory / "upstream.log"))
    servers: dict[str, rig.Server] = {}
    for contender in (CONTENDERS[name] for name in names):
        name = contender.process
        if name in servers:
            continue
        rig.say(f"starting {name}")
        if contender.rival is not None:
            server = rival_server(directory, name, *contender.rival)
        else:
            router = PATIENT if name == "ours patient" else ""
            server = rig.gateway(directory, name, upstream=upstream, router=router)
        servers[name] = stack.enter_context(rig.running(server))
        warm(server)
    return servers


def warm(server: rig.Server) -> None:
    for words in (20, 150):
        bodies = [rig.route_body(each) for each in rig.prompts(16, words, f"warm {words}")]
        rig.load(Job(port=server.port, path="/route", bodies=bodies, rate=16))


def run(
    server: rig.Server, contender: Contender, scenario: Scenario, texts: Sequence[str]
) -> Result:
    shape = rig.route_body if contender.path == "/route" else rig.chat_body
    job = Job(
        port=server.port,
        path=contender.path,
        bodies=[shape(text) for text in texts],
        rate=scenario.rate,
        timeout_s=TIMEOUT_S,
    )
    result = rig.load(job)
    if result.lost and contender.rival is not None:
        server.restart_at_once()
        warm(server)
    return result


def judged(result: Result) -> dict[str, float]:
    """Shares of the sent: answered in time by the full model, and by the fast one under pressure."""
    degraded = sum(n for reason, n in result.reasons.items() if reason.startswith("degraded"))
    return {
        "full": round((result.answered - degraded) / result.sent, 4),
        "fast": round(result.reasons.get(FAST, 0) / result.sent, 4),
    }


def median(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return round(statistics.median(row[key] for row in rows), 4)


def measure(
    servers: Mapping[str, rig.Server], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    table: list[dict[str, object]] = []
    for words in arguments.words:
        for name in arguments.scenarios:
            scenario = SCENARIOS[name]
            taken: dict[str, list[dict]] = {each: [] for each in arguments.servers}
            for number in range(arguments.rounds):
                texts = rig.prompts(scenario.count, words, f"{name} {words} {number}")
                for each in arguments.servers:
                    contender = CONTENDERS[each]
                    result = run(servers[contender.process], contender, scenario, texts)
                    taken[each].append(dataclasses.asdict(result) | judged(result))
                    rig.say(f"{words} words, {name}, {each}: {brief(taken[each][-1])}")
            table += [row(name, words, each, taken) for each in arguments.servers]
    return table


def row(scenario: str, words: int, name: str, taken: Mapping[str, list[dict]]) -> dict[str, object]:
    """Medians over rounds; ratios are those of each round, so that both sides met the same noise."""
    mine = taken[name]
    figures: dict[str, object] = {"scenario": scenario, "words": words, "server": name}
    figures |= {key: median(mine, key) for key in FIGURES}
    for rival in ("to_thread", "to_thread, our model"):
        if name.startswith("ours") and taken.get(rival):
            pairs = zip(taken[rival], mine, strict=True)
            ratio = statistics.median(theirs["p95_ms"] / ours["p95_ms"] for theirs, ours in pairs)
            figures[f"p95 of {rival} / own"] = round(ratio, 2)
    return figures | {"rounds": mine}


def brief(found: Mapping[str, object]) -> str:
    return (
        " ".join(f"{key}={found[key]}" for key in FIGURES) + f" {found['ends']} {found['reasons']}"
    )


def in_ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def as_table(rows: Sequence[Mapping[str, object]]) -> str:
    lines = [
        "| Prompts | Server | Lost | p50 | p95 | p99 ms | Full / fast model | p95 against to_thread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        ratios = [str(each[key]) for key in each if key.startswith("p95 of")]
        cells = [
            f"{each['scenario']}, {each['words']} words",
            each["server"],
            f"{each['lost']:.0f}",
            *(in_ms(each[key]) for key in ("p50_ms", "p95_ms", "p99_ms")),
            f"{each['full']:.0%} / {each['fast']:.0%}",
            " / ".join(f"{ratio} x" for ratio in ratios) or "–",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--words", nargs="+", type=int, default=[20, 150])
    parser.add_argument("--out", type=Path, default=rig.OUT / "burst.json")
    arguments = parser.parse_args()
    if any(CONTENDERS[name].rival for name in arguments.servers) and not BENCH_PYTHON.exists():
        sys.exit(f"{BENCH_PYTHON} is missing: run `make .venv-bench/.installed`")
    rig.unwind_on_sigterm()
    before = rig.machine()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        rows = measure(started(stack, Path(directory), arguments.servers), arguments)
    print(as_table(rows))
    document = {"bench": "burst", "timeout_s": TIMEOUT_S, "rounds": arguments.rounds}
    machine = {"before": dataclasses.asdict(before), "after": dataclasses.asdict(rig.machine())}
    rig.write(arguments.out, {**document, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
