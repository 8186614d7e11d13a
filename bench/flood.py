"""Three times the capacity for a minute through the whole path: Envoy, gRPC, sidecar, workers, a model.

    python bench/flood.py [--seconds 60] [--times 3] [--repeat 20] [--rounds 1] [--out FILE]

Whole chats with `model: "auto"`, open-loop, prompts and routes from tests/data/prompts as in
overload.py, which measures the same without Envoy and gRPC. A patient twin of the gateway says first
where the full encoder sends each prompt, and how many it decides in a second. Bounded by --seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import accuracy
import rig
from loadgen import Job, Result

SETS = ("English: CLINC's 10 domains", "mixed utterances, Chinese prompts")
OTHER = "other"
PATIENT = 'deadline = "4500ms"\ncache = 0'
REFERENCE_RATE = 40.0
"""Prompts a second while the full encoder's decisions are written down: no queue."""
CAPACITY_CONNECTIONS = 32
CAPACITY_S = 4.0
PROBES_PER_S, PROBE_S = 25.0, 4.0


def reference(server: rig.Server, texts: list[str]) -> tuple[dict[str, str], float]:
    """Where the full encoder sends each text, and how many it decides in a second."""
    bodies = [rig.chat_body(text) for text in texts]
    told = rig.load(
        Job(server.port, "/v1/chat/completions", bodies, rate=REFERENCE_RATE, tell_routes=True)
    )
    assert told.lost == 0, told.ends
    full = {
        t: route for t, (route, reason) in zip(texts, told.routes, strict=True) if not late(reason)
    }
    closed = rig.load(
        Job(
            server.port,
            "/v1/chat/completions",
            bodies,
            connections=CAPACITY_CONNECTIONS,
            seconds=CAPACITY_S,
        )
    )
    return full, closed.per_second


def late(reason: str) -> bool:
    return reason.startswith("degraded")


def flooded(server: rig.Server, texts: list[str], *, rate: float, seconds: float) -> Result:
    count = int(rate * seconds)
    bodies = [rig.chat_body(texts[n % len(texts)]) for n in range(count)]
    return rig.load(Job(server.port, "/v1/chat/completions", bodies, rate=rate, tell_routes=True))


def back_to_normal_s(server: rig.Server, texts: list[str]) -> float:
    """From the last answer of the load to the last decision that was still degraded."""
    bodies = [rig.chat_body(texts[n % len(texts)]) for n in range(int(PROBES_PER_S * PROBE_S))]
    told = rig.load(
        Job(server.port, "/v1/chat/completions", bodies, rate=PROBES_PER_S, tell_routes=True)
    )
    degraded = [n for n, (_, reason) in enumerate(told.routes) if late(reason)]
    return (degraded[-1] + 1) / PROBES_PER_S if degraded else 0.0


def decision_p95_s(server: rig.Server, before: dict[float, float]) -> float:
    """Of the sidecar's own histogram, since `before`: an upper bound, the bucket's edge."""
    grown = {edge: n - before.get(edge, 0.0) for edge, n in server.buckets(DECISIONS).items()}
    total = max(grown.values())
    return min(edge for edge, n in grown.items() if n >= 0.95 * total)


DECISIONS = "pointsman_decision_seconds"


def run(
    directory: Path, name: str, arguments: argparse.Namespace, *, round_: int
) -> dict[str, object]:
    draw = accuracy.sets(accuracy.SAMPLES, 20)[name](random.Random(round_))
    labels = {" ".join([text] * arguments.repeat): route for text, route in draw.prompts}
    texts = random.Random(round_).sample(list(labels), len(labels))
    routes = {OTHER: (), **draw.utterances}
    with rig.scripted_upstream(directory / "upstream.log") as upstream:
        patient = rig.gateway(
            directory, "patient", upstream=upstream, router=PATIENT, routes=routes
        )
        with rig.running(patient):
            full, capacity = reference(patient, texts)
        server = rig.gateway(
            directory, "gateway", upstream=upstream, router="cache = 0", routes=routes
        )
        with rig.running(server):
            flooded(server, texts, rate=REFERENCE_RATE, seconds=2)  # warm
            before = server.buckets(DECISIONS)
            spent = server.cpu_seconds()
            rate = arguments.times * capacity
            found = flooded(server, texts, rate=rate, seconds=arguments.seconds)
            spent = {part: at - spent[part] for part, at in server.cpu_seconds().items()}
            p95_s = decision_p95_s(server, before)
            calm_s = back_to_normal_s(server, texts)
    sent = [texts[n % len(texts)] for n in range(len(found.routes))]
    inside = [
        (full[text], route, reason)
        for text, (route, reason) in zip(sent, found.routes, strict=True)
        if text in full and labels[text] is not None
    ]
    reasons = Counter(reason for _, reason in found.routes)
    return {
        "capacity_per_s": capacity,
        "offered_per_s": round(rate, 1),
        "sent": found.sent,
        "lost": found.lost,
        "ends": found.ends,
        "share_by_reason": {k: round(n / found.sent, 3) for k, n in reasons.most_common()},
        "as_the_full_encoder": round(sum(a == b for a, b, _ in inside) / len(inside), 3),
        "decision_p95_at_most_ms": p95_s * 1e3,
        "whole_chat_ms": {"p50": found.p50_ms, "p95": found.p95_ms, "p99": found.p99_ms},
        "back_to_normal_s": calm_s,
        "send_lag_ms": found.send_lag_ms,
        "cores_used": {k: round(v / arguments.seconds, 2) for k, v in spent.items()},
    }


def as_table(figures: dict[str, list[dict]]) -> str:
    lines = [
        "| Prompts | Capacity, offered | Sent | Lost | Decision p95 | Chat p50 / p95 / p99 | As full | Normal after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rounds in figures.items():
        for each in rounds:
            chat = " / ".join(f"{ms:.0f}" for ms in each["whole_chat_ms"].values())
            lines.append(
                f"| {name} | {each['capacity_per_s']:.0f}, {each['offered_per_s']:.0f} | {each['sent']:,} "
                f"| {each['lost']} | <= {each['decision_p95_at_most_ms']:.0f} | {chat} "
                f"| {each['as_the_full_encoder']:.0%} | {each['back_to_normal_s']:.2f} s |"
            )
    return "\n".join(lines)


def main() -> None:
    rig.unwind_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=3.0, help="offered, in capacities")
    parser.add_argument("--repeat", type=int, default=20, help="a prompt is its text so many times")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=rig.OUT / "flood.json")
    arguments = parser.parse_args()
    begun, figures = rig.machine(), dict[str, list[dict]]()
    with tempfile.TemporaryDirectory() as directory:
        for round_ in range(arguments.rounds):
            for name in SETS:
                found = run(Path(directory), name, arguments, round_=round_)
                figures.setdefault(name, []).append(found)
                rig.say(json.dumps({name: found}))
    print(as_table(figures))
    rig.write(
        arguments.out,
        {
            "machine": [dataclasses.asdict(begun), dataclasses.asdict(rig.machine())],
            "arguments": {key: str(value) for key, value in vars(arguments).items()},
            "figures": figures,
        },
    )


if __name__ == "__main__":
    main()
