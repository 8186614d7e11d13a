"""How well each way to score routes picks the right one, on the same embeddings and prompts.

    python bench/accuracy.py [DATA] [--utterances 20] [--draws 3] [--out bench/out/accuracy.json]
                             [--encoder FOLDER]

DATA is a folder with the files that tests/data/prompts has, which is also the default. Our rule is the
product's own code, with its own model or one that `pointsman export-model` wrote; the semantic-router library's is written anew from its version 1.1.1, where it is
`IndexedRouter`: the five utterances nearest to the prompt vote, each route's votes are aggregated by
mean (the default), max or sum, and a route without a vote scores 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np

from extproc.core.routing import RouteRule, SemanticIndex, calibrated
from extproc.embedding.encoder import Encoder
from extproc.embedding.model import default_cache_dir, ensure_model
from extproc.evaluation.calibrate import calibrate
from extproc.evaluation.metrics import NONE, Observations, auroc, outcomes_at, top_1

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "tests" / "data" / "prompts"
TOP_K = 5

Rows = list[tuple[str, str | None]]


# --- the sets of prompts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """Utterances of each route, and prompts with the route they belong to."""

    utterances: dict[str, list[str]]
    prompts: Rows


def read(folder: Path, name: str) -> Rows:
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["text"], row["route"]) for row in map(json.loads, lines)]


def split(rows: Rows, count: int, seed: random.Random, routes: Sequence[str] = ()) -> Draw:
    """`count` of a route's rows as its utterances, half of them where there are few; the rest prompts."""
    by_route: dict[str, list[str]] = {}
    for text, route in rows:
        if route is not None and (not routes or route in routes):
            by_route.setdefault(route, []).append(text)
    utterances, prompts = {}, []
    for route, texts in by_route.items():
        shuffled = seed.sample(texts, len(texts))
        taken = count if 2 * len(texts) >= 3 * count else len(texts) // 2
        utterances[route] = shuffled[:taken]
        prompts += [(text, route) for text in shuffled[taken:]]
    return Draw(utterances, prompts)


def select(rows: Rows, routes: Sequence[str]) -> Rows:
    return [(text, route) for text, route in rows if route in routes]


def outside(rows: Rows, routes: Sequence[str]) -> Rows:
    """The rows of these routes, as prompts that belong nowhere."""
    return [(text, None) for text, _ in select(rows, routes)]


KINDS = ("code", "math")
NEITHER_EN = (
    "writing", "roleplay", "extraction", "stem", "humanities", "generic", "knowledge",
    "common-sense", "counterfactual",
)  # fmt: skip
"""MT-Bench's categories that ask for neither code nor calculation."""


def sets(folder: Path, count: int) -> dict[str, Callable[[random.Random], Draw]]:
    train, test = read(folder, "clinc_domains_train"), read(folder, "clinc_domains_test")
    kinds, bench, belle = (read(folder, n) for n in ("kinds_en", "mtbench_en", "belle_zh"))
    belle_routes = {route for _, route in belle if route}
    neither_en = outside(bench, NEITHER_EN)
    neither_zh = outside(belle, sorted(belle_routes - {*KINDS}))

    def english(seed: random.Random) -> Draw:
        draw = split(kinds, count, seed)
        return Draw(draw.utterances, draw.prompts + neither_en)

    def chinese(seed: random.Random) -> Draw:
        draw = split(belle, count, seed, KINDS)
        return Draw(draw.utterances, draw.prompts + neither_zh)

    def mixed(seed: random.Random) -> tuple[Draw, Draw]:
        """Half of the utterances in each language; English prompts, and Chinese ones."""
        en, zh = split(kinds, count // 2, seed), split(belle, count // 2, seed, KINDS)
        both = {kind: en.utterances[kind] + zh.utterances[kind] for kind in KINDS}
        return Draw(both, en.prompts + neither_en), Draw(both, zh.prompts + neither_zh)

    def across(seed: random.Random) -> Draw:
        return Draw(english(seed).utterances, select(belle, KINDS) + neither_zh)

    def belle_kinds(seed: random.Random) -> Draw:
        draw = split(belle, count, seed, sorted(belle_routes - {"open qa"}))
        return Draw(draw.utterances, draw.prompts + outside(belle, ("open qa",)))

    return {
        "English: code, math": english,
        "English: CLINC's 10 domains": lambda seed: Draw(
            split(train, count, seed).utterances, test
        ),
        "English: MT-Bench's 13 categories": lambda seed: split(bench, count, seed),
        "Chinese: code, math": chinese,
        "Chinese: 9 kinds of BELLE": belle_kinds,
        "mixed utterances, English prompts": lambda seed: mixed(seed)[0],
        "mixed utterances, Chinese prompts": lambda seed: mixed(seed)[1],
        "English utterances, Chinese prompts": across,
    }


# --- ways to score ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """`utterances[r]` (count, dimension) of route r."""

    utterances: list[np.ndarray]

    def similarities(self, query: np.ndarray) -> list[np.ndarray]:
        return [query @ block.T for block in self.utterances]


def blend(index: Index) -> Callable[[np.ndarray], list[float]]:
    names = [str(number) for number in range(len(index.utterances))]
    rules = [RouteRule(name, utterances=("-",)) for name in names]
    ours = SemanticIndex(rules, dict(zip(names, index.utterances, strict=True)))
    return lambda query: [score.score for score in ours.scores(query)]


def by_vector(rule: Callable[[Index, np.ndarray], np.ndarray]):
    """A rule for one vector; of a long prompt's two vectors the better counts, as for ours."""

    def scorer(index: Index) -> Callable[[np.ndarray], list[float]]:
        return lambda query: np.max([rule(index, vector) for vector in query], axis=0).tolist()

    return scorer


@by_vector
def nearest(index: Index, vector: np.ndarray) -> np.ndarray:
    return np.array([each.max() for each in index.similarities(vector)])


@by_vector
def centroid(index: Index, vector: np.ndarray) -> np.ndarray:
    means = [block.mean(axis=0) for block in index.utterances]
    return np.array([vector @ mean / np.linalg.norm(mean) for mean in means])


@by_vector
def top_3(index: Index, vector: np.ndarray) -> np.ndarray:
    return np.array([np.sort(each)[-3:].mean() for each in index.similarities(vector)])


def library(aggregate: Callable[[np.ndarray], float]):
    @by_vector
    def scorer(index: Index, vector: np.ndarray) -> np.ndarray:
        similarities = index.similarities(vector)
        route_of = np.repeat(np.arange(len(similarities)), [len(each) for each in similarities])
        flat = np.concatenate(similarities)
        votes = np.argsort(flat)[-TOP_K:]
        return np.array(
            [
                aggregate(flat[votes[route_of[votes] == route]]) if (route_of[votes] == route).any() else 0.0
                for route in range(len(similarities))
            ]
        )  # fmt: skip

    return scorer


SCORERS = {
    "ours: blend": blend,
    "nearest": nearest,
    "centroid": centroid,
    "mean of top 3": top_3,
    "library: mean": library(np.mean),
    "library: max": library(np.max),
    "library: sum": library(np.sum),
}


# --- measuring ----------------------------------------------------------------------------------------


class Vectors:
    """Each text embedded once. Mutable: `_known`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: dict[str, np.ndarray] = {}

    def of(self, text: str) -> np.ndarray:
        if text not in self._known:
            self._known[text] = self._encoder.encode(text)
        return self._known[text]


def measure(draw: Draw, score, vectors: Vectors) -> dict[str, float | None]:
    routes = list(draw.utterances)
    index = Index(
        [np.concatenate([vectors.of(t) for t in own]) for own in draw.utterances.values()]
    )
    scorer = score(index)
    scores = [[*scorer(vectors.of(text)), np.nan] for text, _ in draw.prompts]
    rules = [RouteRule(name, utterances=tuple(own)) for name, own in draw.utterances.items()]
    vectors_of = dict(zip(routes, index.utterances, strict=True))
    thresholds = [each.effective_threshold for each in calibrated(rules, vectors_of)]
    seen = Observations(
        routes=(*routes, "default"),
        default=len(routes),
        labels=np.array([NONE if r is None else routes.index(r) for _, r in draw.prompts]),
        outcomes=np.full(len(draw.prompts), NONE),
        scores=np.array(scores),
        thresholds=np.array([*thresholds, np.nan]),
    )
    inside = seen.in_scope
    ours = score is blend
    right = seen.right(outcomes_at(seen, seen.thresholds))
    calibration = calibrate(seen)
    return {
        "prompts": len(draw.prompts),
        "top_1": float(seen.right(top_1(seen))[inside].mean()),
        "auroc": auroc(seen),
        "balanced": calibration.one.held_out if calibration else None,
        "in_scope_by_default": float(right[inside].mean()) if ours else None,
        "no_route_by_default": float(right[~inside].mean()) if ours and not inside.all() else None,
    }


def mean(figures: list[dict[str, float | None]]) -> dict[str, float | None]:
    def over(key: str) -> float | None:
        values = [each[key] for each in figures if each[key] is not None]
        return float(np.mean(values)) if values else None

    return {key: over(key) for key in figures[0]}


def run(
    folder: Path, count: int, draws: int, encoder: str | None
) -> Iterator[tuple[str, str, dict[str, float | None]]]:
    files = ensure_model(encoder, cache_dir=default_cache_dir(os.environ), progress=say)
    vectors = Vectors(Encoder(files))
    for name, build in sets(folder, count).items():
        started = time.monotonic()
        drawn = [build(random.Random(seed)) for seed in range(draws)]
        for scorer, score in SCORERS.items():
            yield name, scorer, mean([measure(draw, score, vectors) for draw in drawn])
        say(f"{name}: {time.monotonic() - started:.0f} s")


def table(figures: dict[str, dict[str, dict]]) -> str:
    lines = []
    for metric in ("top_1", "auroc", "balanced"):
        lines += ["", f"{metric:<37}" + "".join(f"{name:>15}" for name in SCORERS)]
        for name, by_scorer in figures.items():
            values = [by_scorer[scorer][metric] for scorer in SCORERS]
            best = max((v for v in values if v is not None), default=None)
            cells = ["–" if v is None else f"{'*' if v == best else ''}{v:.3f}" for v in values]
            lines.append(f"{name:<37}" + "".join(f"{cell:>15}" for cell in cells))
    lines += [
        "",
        f"{'ours, thresholds of the product':<37}{'prompts':>15}{'in scope':>15}{'no route':>15}",
    ]
    for name, by_scorer in figures.items():
        ours = by_scorer["ours: blend"]
        shares = (ours["in_scope_by_default"], ours["no_route_by_default"])
        cells = [f"{ours['prompts']:.0f}", *("–" if v is None else f"{v:.3f}" for v in shares)]
        lines.append(f"{name:<37}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines[1:])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path, nargs="?", default=SAMPLES, metavar="DATA")
    parser.add_argument("--utterances", type=int, default=20, help="a route")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--encoder", metavar="FOLDER", help="instead of the default model")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "accuracy.json")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, dict]] = {}
    for name, scorer, found in run(
        arguments.data, arguments.utterances, arguments.draws, arguments.encoder
    ):
        figures.setdefault(name, {})[scorer] = found
    print(table(figures))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    setup = {
        "encoder": arguments.encoder or "default",
        "utterances": arguments.utterances,
        "draws": arguments.draws,
    }
    text = json.dumps({**setup, "sets": figures}, ensure_ascii=False, indent=2)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    say(f"{arguments.out}: written")


if __name__ == "__main__":
    main()
