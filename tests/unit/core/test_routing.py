"""The score against a literal formula, and decisions and names against literal expectations."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import CHAT, CODE, NOWHERE, embedded

from extproc.core.errors import RouteReason
from extproc.core.routing import (
    THRESHOLD,
    THRESHOLD_FEW,
    Auto,
    ModelDirectory,
    NamedRoute,
    NamedUpstream,
    RouteRule,
    RouteScore,
    SemanticIndex,
    calibrated,
    decide_by_scores,
)

# --- scores ---------------------------------------------------------------------------------------


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("queries", [1, 2])
def test_score_is_half_nearest_and_half_centroid_for_the_best_query(
    seed: int, queries: int
) -> None:
    dice = np.random.default_rng(seed)
    blocks = {f"r{n}": unit(dice.normal(size=(n, 8))) for n in (1, 2, 5)}
    rules = [RouteRule(name, utterances=("x",) * len(block)) for name, block in blocks.items()]
    query = unit(dice.normal(size=(queries, 8)))
    found = SemanticIndex(rules, blocks).scores(query)
    for score, (name, block) in zip(found, blocks.items(), strict=True):
        literal = max(
            0.5 * max(float(q @ u) for u in block)
            + 0.5 * float(q @ (block.mean(axis=0) / np.linalg.norm(block.mean(axis=0))))
            for q in query
        )
        assert score.route == name
        assert score.score == pytest.approx(literal, abs=1e-6)


def test_utterances_that_cancel_out_have_no_centroid_and_still_score() -> None:
    index = SemanticIndex(
        [RouteRule("r", utterances=("a", "b"))], {"r": np.float32([[1, 0], [-1, 0]])}
    )
    (score,) = index.scores(np.float32([[1, 0]]))
    assert score.score == 0.5


def test_a_route_without_utterances_has_no_score() -> None:
    rules = [RouteRule("bare"), RouteRule("code", utterances=("x",))]
    index = SemanticIndex(rules, {"code": np.float32([CODE])})
    assert [score.route for score in index.scores(embedded(CODE).vectors)] == ["code"]
    assert not index.is_empty
    assert SemanticIndex([RouteRule("bare")], {}).is_empty
    assert SemanticIndex([RouteRule("bare")], {}).scores(embedded(CODE).vectors) == ()


@pytest.mark.parametrize(
    ("utterances", "own", "expected"),
    [
        (1, None, THRESHOLD_FEW),
        (9, None, THRESHOLD_FEW),
        (10, None, THRESHOLD),
        (1, 0.0, 0.0),
        (20, 0.9, 0.9),
    ],
)
def test_threshold_follows_the_number_of_utterances_unless_set(
    utterances: int, own: float | None, expected: float
) -> None:
    rule = RouteRule("r", utterances=("x",) * utterances, threshold=own)
    assert rule.effective_threshold == expected
    (score,) = SemanticIndex([rule], {"r": np.float32([CHAT] * utterances)}).scores(
        np.float32([NOWHERE])
    )
    assert score.threshold == expected


def test_index_of_unknown_vectors_scores_nothing_yet_is_worth_asking() -> None:
    index = SemanticIndex([RouteRule("code", utterances=("x",))], None)
    assert not index.is_empty
    assert not index.is_known
    assert index.scores(embedded(CODE).vectors) == ()
    assert SemanticIndex([RouteRule("code")], None).is_empty


# --- thresholds from the utterances ----------------------------------------------------------------


def scattered(seed: int, count: int, spread: float) -> dict[str, np.ndarray]:
    """Four routes in one corner of the space: `spread` says how far apart they are."""
    dice = np.random.default_rng(seed)
    centres = np.ones(16) + dice.normal(size=(4, 16), scale=spread)
    return {
        f"r{n}": unit(each + dice.normal(size=(count, 16), scale=0.2))
        for n, each in enumerate(centres)
    }


def rules_of(blocks: dict[str, np.ndarray], **more: float | None) -> list[RouteRule]:
    return [
        RouteRule(name, utterances=("x",) * len(block), **more) for name, block in blocks.items()
    ]


def test_close_routes_ask_for_more_than_what_they_score_on_each_other() -> None:
    blocks = scattered(0, 12, 0.5)
    index = SemanticIndex(rules_of(blocks), blocks)
    strangers = [
        score.score
        for name, block in blocks.items()
        for vector in block
        for score in index.scores(vector[None])
        if score.route != name
    ]
    expected = np.mean(strangers) + 1.5 * np.std(strangers)
    assert expected > THRESHOLD
    for rule in calibrated(rules_of(blocks), blocks):
        assert rule.threshold == pytest.approx(expected, abs=1e-3)


def test_routes_that_differ_in_kind_keep_the_floor() -> None:
    axes = np.eye(8, dtype=np.float32)
    blocks = {f"r{n}": np.repeat(axes[n : n + 1], 12, axis=0) for n in range(3)}
    assert {rule.threshold for rule in calibrated(rules_of(blocks), blocks)} == {THRESHOLD}
    few = {name: block[:5] for name, block in blocks.items()}
    assert {rule.threshold for rule in calibrated(rules_of(few), few)} == {THRESHOLD_FEW}


def test_threshold_of_the_file_stays_and_so_do_routes_without_utterances() -> None:
    blocks = scattered(1, 12, 0.3)
    rules = [*rules_of(blocks, threshold=0.1), RouteRule("bare")]
    assert calibrated(rules, blocks) == rules


@pytest.mark.parametrize("blocks", [{}, scattered(0, 1, 0.1), {"r0": scattered(0, 50, 0.1)["r0"]}])
def test_too_few_strangers_change_nothing(blocks: dict[str, np.ndarray]) -> None:
    assert calibrated(rules_of(blocks), blocks) == rules_of(blocks)


def test_thousands_of_utterances_are_sampled() -> None:
    blocks = scattered(2, 2000, 0.5)
    few = {name: block[::8] for name, block in blocks.items()}
    of_all = calibrated(rules_of(blocks), blocks)[0].threshold
    assert of_all == pytest.approx(calibrated(rules_of(few), few)[0].threshold, abs=0.02)


def test_threshold_never_exceeds_what_a_score_can_be() -> None:
    blocks = {name: np.float32([[1, 0]] * 12) for name in "abc"}
    assert {rule.threshold for rule in calibrated(rules_of(blocks), blocks)} == {1.0}


# --- decisions ------------------------------------------------------------------------------------


def test_score_below_threshold_takes_default_route() -> None:
    scores = (RouteScore("code", 0.31, 0.32), RouteScore("chat", 0.1, 0.28))
    decision = decide_by_scores(scores, default="chat")
    assert (decision.route, decision.reason, decision.scores) == (
        "chat",
        RouteReason.DEFAULT,
        scores,
    )


def test_score_at_the_threshold_is_admitted() -> None:
    decision = decide_by_scores((RouteScore("code", 0.32, 0.32),), default="chat")
    assert (decision.route, decision.reason) == ("code", RouteReason.SEMANTIC)


def test_best_of_the_admitted_wins_over_a_better_score_that_is_not_admitted() -> None:
    scores = (RouteScore("a", 0.8, 0.9), RouteScore("b", 0.4, 0.3), RouteScore("c", 0.5, 0.3))
    assert decide_by_scores(scores, default="a").route == "c"


def test_first_route_of_the_file_wins_a_tie() -> None:
    scores = (RouteScore("a", 0.5, 0.3), RouteScore("b", 0.5, 0.3))
    assert decide_by_scores(scores, default="b").route == "a"


def test_no_scores_take_the_default_route() -> None:
    assert decide_by_scores((), default="chat").reason is RouteReason.DEFAULT


# --- the names a client may write -----------------------------------------------------------------

DIRECTORY = ModelDirectory(
    aliases=("auto", "smart"),
    upstreams={"primary": ("vllm", "gpt"), "gpt": ("other", "gpt"), "third": ("third", "chat")},
    routes=("chat", "code", "primary"),
)


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("auto", Auto()),
        ("smart", Auto()),
        ("primary", NamedUpstream("primary")),  # an id before a route of that name
        ("vllm", NamedUpstream("primary")),
        ("gpt", NamedUpstream("gpt")),  # an id before another one's model
        ("other", NamedUpstream("gpt")),
        ("chat", NamedUpstream("third")),  # a model before a route of that name
        ("code", NamedRoute("code")),
        ("AUTO", None),
        ("", None),
        ("auto ", None),
    ],
)
def test_names_are_found_by_precedence(model: str, target: object) -> None:
    assert DIRECTORY.find(model) == target


def test_alias_comes_before_everything() -> None:
    directory = ModelDirectory(aliases=("a",), upstreams={"a": ("b", "c")}, routes=("a",))
    assert directory.find("a") == Auto()


def test_first_upstream_of_the_file_answers_for_a_shared_model() -> None:
    directory = ModelDirectory(aliases=(), upstreams={"x": ("x", "m"), "y": ("y", "m")}, routes=())
    assert directory.find("m") == NamedUpstream("x")


def test_every_name_is_listed_once() -> None:
    assert DIRECTORY.names == (
        "auto", "smart", "primary", "gpt", "third", "vllm", "other", "chat", "code",
    )  # fmt: skip
