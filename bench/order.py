"""Who gets a worker under overload: order and refusal compared, on costs of the real encoder; simulated.

    python bench/order.py [--out bench/out/order.json]

Open-loop Poisson arrivals, one worker. Texts of 5 to 300 words, whose cost is measured first. All have the
same time, so that earliest-deadline-first is first-come-first-served. Who is refused is decided by the
static encoder at once; who is late, when its time is up.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
from accuracy import SAMPLES

from extproc.embedding.encoder import Encoder
from extproc.embedding.model import default_cache_dir, ensure_model

WORDS = (5, 10, 20, 40, 60, 80, 100, 120, 150, 180, 200, 220, 250, 300)
LIMIT_S, WAIT_SHARE = 0.9 * 0.150, 2 / 3
"""What the judge leaves the workers of `[router] deadline`, and what the line admits of it."""
OVERHEAD_S, NOISE = 0.00015, 0.15
POLICIES = ("in turn, refused by count", "in turn, refused by size", "shortest first")
LENGTHS = {
    "even": lambda rng: rng.uniform(5, 300),
    "mostly short": lambda rng: math.exp(rng.uniform(math.log(5), math.log(300))),
}


def costs_s() -> list[float]:
    encoder = Encoder(ensure_model(None, cache_dir=default_cache_dir(os.environ), progress=print))
    lines = (SAMPLES / "clinc_domains_train.jsonl").read_text().splitlines()
    words = " ".join(json.loads(line)["text"] for line in lines).split()
    found = []
    for count in WORDS:
        took = []
        for at in range(0, 30 * 20, 20):
            text, began = " ".join(words[at : at + count]), time.perf_counter()
            encoder.encode(text)
            took.append(time.perf_counter() - began)
        found.append(min(took) + OVERHEAD_S)
    return found


def simulate(arrivals: list[tuple[float, float, float, float]], policy: str) -> dict[str, float]:
    """`arrivals`: when, words, expected and true seconds of work."""
    mean_s = float(np.mean([true_s for *_, true_s in arrivals]))
    free_s, waiting, told, line_s = 0.0, list[tuple[float, int]](), {}, 0.0

    def work_until(now_s: float) -> None:
        nonlocal free_s, line_s
        while waiting and free_s <= now_s:
            at = heapq.heappop(waiting)[1]
            came_s, _, expected_s, true_s = arrivals[at]
            line_s -= expected_s
            if free_s - came_s >= LIMIT_S:
                told[at] = (False, LIMIT_S)
                continue
            free_s = max(free_s, came_s) + true_s
            told[at] = (free_s - came_s <= LIMIT_S, min(free_s - came_s, LIMIT_S))

    for at, (came_s, _, expected_s, _) in enumerate(arrivals):
        work_until(came_s)
        ahead_s = {
            POLICIES[0]: (len(waiting) + 1.5) * mean_s,
            POLICIES[1]: line_s + 0.5 * mean_s + expected_s,
        }.get(policy, 0.0)
        if free_s > came_s and ahead_s > WAIT_SHARE * LIMIT_S:
            told[at] = (False, 0.0)
            continue
        heapq.heappush(waiting, (expected_s if policy == POLICIES[2] else came_s, at))
        line_s += expected_s
        work_until(came_s)
    work_until(math.inf)
    long = [told[at][0] for at, (_, words, *_) in enumerate(arrivals) if words > 150]
    return {
        "full_encoder": float(np.mean([full for full, _ in told.values()])),
        "of_long": float(np.mean(long)),
        "p95_ms": float(np.percentile([took_s * 1e3 for _, took_s in told.values()], 95)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "order.json")
    out = parser.parse_args().out
    costs, figures = costs_s(), []
    for lengths, draw in LENGTHS.items():
        for load in (0.8, 1.2, 2.0):
            rng, now_s, arrivals = random.Random(0), 0.0, []
            mean_s = float(np.mean([np.interp(draw(rng), WORDS, costs) for _ in range(20_000)]))
            for _ in range(20_000):
                now_s += rng.expovariate(load / mean_s)
                words = draw(rng)
                expected_s = float(np.interp(words, WORDS, costs))
                arrivals.append(
                    (now_s, words, expected_s, expected_s * rng.lognormvariate(0, NOISE))
                )
            for policy in POLICIES:
                row = {"lengths": lengths, "load": load, "policy": policy}
                figures.append(row | simulate(arrivals, policy))
                full, long, p95_ms = (figures[-1][k] for k in ("full_encoder", "of_long", "p95_ms"))
                print(f"{lengths:12} {load} {policy:25} {full:6.1%} {long:6.1%} {p95_ms:5.0f} ms")
    out.parent.mkdir(parents=True, exist_ok=True)
    costs_ms = dict(zip(WORDS, (each * 1e3 for each in costs), strict=True))
    out.write_text(json.dumps({"costs_ms": costs_ms, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
