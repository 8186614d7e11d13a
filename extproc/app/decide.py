"""One decision outside of any request, with its scores and timings; it counts among no requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from extproc.core import body as bodies
from extproc.core.exchange import (
    Continue,
    Embedded,
    Exchange,
    NeedEmbedding,
    NotEmbedded,
    Plan,
    RequestBody,
    RequestHeaders,
    Respond,
    Scored,
    scores_as_data,
)
from extproc.serving.servicer import Embed


@dataclass(frozen=True, slots=True)
class Told:
    """`answer`: what `POST /route` answers, and `timings`; of a refusal the error alone."""

    status: int
    answer: dict[str, Any]


async def decide(
    plan: Plan,
    embed: Embed,
    body: bytes,
    *,
    patience_s: float,
    headers: Sequence[tuple[str, str]] = (),
    score_anyway: bool = False,
) -> Told:
    """What `POST /route` answers for its `body`.

    `score_anyway`: where a rule decided, tell as `scores_unasked` what meaning would have said.
    """
    exchange = Exchange(plan)
    started = time.perf_counter()
    action = exchange.receive(
        RequestHeaders("POST", "/route", "application/json", "", False, named=tuple(headers))
    )
    assert isinstance(action, Continue)
    action = exchange.receive(RequestBody(body))
    wait_s = embed_s = 0.0
    if isinstance(action, NeedEmbedding):
        embedded, wait_s, embed_s = await _embedded(embed, action.text, patience_s)
        action = exchange.receive(embedded)
    total_s = time.perf_counter() - started
    assert isinstance(action, Respond)
    answer: dict[str, Any] = msgspec.json.decode(action.body)
    if action.status != 200:
        return Told(action.status, answer)
    if score_anyway and answer["matched"] is not None and not plan.index.is_empty:
        text = bodies.prompt_text(bodies.parse(body))
        embedded, *_ = await _embedded(embed, text, patience_s)
        if isinstance(embedded, Embedded):
            embedded = Scored(plan.index.scores(embedded.vectors))
        if isinstance(embedded, Scored):
            answer["scores_unasked"] = scores_as_data(embedded.scores)
    answer["timings"] = {
        "total_ms": round(total_s * 1e3, 2),
        "queue_ms": round(wait_s * 1e3, 2),
        "embed_ms": round(embed_s * 1e3, 2),
    }
    return Told(action.status, answer)


async def _embedded(
    embed: Embed, text: str, patience_s: float
) -> tuple[Embedded | Scored | NotEmbedded, float, float]:
    """What came back, the seconds in the queue, and the others until it was there."""
    before = time.perf_counter()
    back = await embed(text, asyncio.get_running_loop().time() + patience_s)
    took_s = time.perf_counter() - before
    wait_s = 0.0 if isinstance(back, NotEmbedded) else back.wait_s
    return back, wait_s, max(took_s - wait_s, 0.0)
