"""`pointsman route`: one decision with every signal, score and threshold behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from extproc.app.decide import decide
from extproc.app.embedding import running_embedding
from extproc.app.plan import compile_plan
from extproc.config import Config
from extproc.core.errors import Content
from extproc.metrics import Metrics

_PATIENCE_S = 10.0
"""A person at a terminal waits longer than a request may."""


async def explain(
    config: Config,
    text: str,
    *,
    headers: Sequence[tuple[str, str]] = (),
    has: Collection[Content] = (),
    progress: Callable[[str], None],
) -> Mapping[str, Any]:
    """What `POST /route` answers for `text`, and the time it took. Raise ModelError.

    `headers`: lower-case names and values; `has`: what else the request holds.
    """
    body: dict[str, Any] = {"prompt": text} | {each.value: [{}] for each in has}
    async with running_embedding(config, _unread_metrics(), progress=progress) as embedding:
        told = await decide(
            compile_plan(config, embedding.utterances),
            embedding.embed,
            msgspec.json.encode(body),
            headers=headers,
            patience_s=_PATIENCE_S,
        )
    return told.answer


def _unread_metrics() -> Metrics:
    return Metrics(CollectorRegistry(), fallback_metric="unread", routes=(), upstream_names=())


def as_text(explained: Mapping[str, Any]) -> str:
    """The same for a person: the decision, the rules in their order, the scores, best first."""
    if "error" in explained:
        return f"no decision: {explained['error']['message']}"
    lines = [
        f"route     {explained['route']}",
        f"because   {_because(explained)}",
        f"model     {explained['model']}",
        f"upstreams {' -> '.join(explained['upstreams'])}",
    ]
    if explained["signals"]:
        lines += ["", *_rules(explained["signals"])]
    scores = explained["scores"]
    if scores:
        width = max(len("ROUTE"), *(len(name) for name in scores))
        lines += ["", f"{'ROUTE':<{width}}  SCORE  THRESHOLD"]
        by_score = sorted(scores.items(), key=lambda item: -item[1]["score"])
        for name, entry in by_score:
            verdict = "admitted" if entry["score"] >= entry["threshold"] else "below"
            lines.append(
                f"{name:<{width}}  {entry['score']:5.3f}  {entry['threshold']:9.3f}  {verdict}"
            )
    timings = explained["timings"]
    lines += [
        "",
        f"decided in {timings['total_ms']} ms, {timings['embed_ms']} ms of them embedding",
    ]
    return "\n".join(lines)


def _rules(signals: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first that matched decided; those below it are shown all the same."""
    rows = [("RULE", "ROUTE", "PRIORITY", "MATCHED")]
    rows += [
        (each["signal"], each["route"], str(each["priority"]), each["matched"] or "-")
        for each in signals
    ]
    rule, route = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:2])
    return [f"{row[0]:<{rule}}  {row[1]:<{route}}  {row[2]:>8}  {row[3]}" for row in rows]


def _because(explained: Mapping[str, Any]) -> str:
    if explained["matched"] is not None:
        return f"{explained['reason']}: {explained['matched']}"
    if explained["reason"] == "default" and explained["scores"]:
        return "default: no route scored above its threshold"
    return str(explained["reason"])
