"""`pointsman eval`: labelled prompts through the router as it is served, then the reports and thresholds."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from extproc.app.embedding import Embedding, running_embedding
from extproc.app.plan import compile_plan
from extproc.config import Config, load, parse
from extproc.core.exchange import (
    Exchange,
    Forward,
    NeedEmbedding,
    Plan,
    RequestBody,
    RequestHeaders,
)
from extproc.core.routing import RouteDecision
from extproc.evaluation.evaluate import Case, Evaluation, evaluate
from extproc.evaluation.metrics import timing
from extproc.evaluation.prompts import DataError, Prompt, parse_prompts, sample
from extproc.evaluation.report import Subject, as_html
from extproc.evaluation.rewrite import RewriteError, with_thresholds
from extproc.evaluation.terminal import NOT_CALIBRATED, as_text, duration, progress_line
from extproc.metrics import Metrics

__all__ = ["DataError", "EvalError", "Order", "Progress", "run", "write_thresholds"]

_PATIENCE_S: Final = 10.0
"""Judgement is measured here, not the deadline of a request."""
_TELL_FIRST_S: Final = 2.0
_TELL_LAST_S: Final = 15.0
_HEAD: Final = RequestHeaders(
    "POST", "/v1/chat/completions", "application/json", "", end_of_stream=False
)


class EvalError(Exception):
    """Why a file was not read or written, in one line."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the person at the terminal asked for."""

    data: Path
    config: Path
    limit: int | None = None
    as_json: bool = False
    report: Path | None = None
    thresholds: Path | None = None
    """Where a configuration with calibrated thresholds goes: a new file, or `config` itself."""


def run(order: Order, *, show: Callable[[str], None], say: Callable[[str], None]) -> None:
    """`show` gets the result; `say` the progress, and the names of the files written.

    Raise ConfigError, DataError, EvalError or ModelError.
    """
    config = load(order.config, environ=None)
    config_bytes = _read(order.config)
    _check_targets(order)
    routes = [route.name for route in config.routes]
    lines = _read(order.data).split(b"\n")
    prompts = sample(parse_prompts(lines, file=str(order.data), routes=routes), order.limit)
    started = datetime.now().astimezone()
    found = asyncio.run(_evaluate(config, prompts, say=say))
    show(_as_json(found) if order.as_json else as_text(found))
    if order.report is not None:
        subject = Subject(str(order.data), str(order.config), f"{started:%Y-%m-%d %H:%M}")
        _write(order.report, as_html(found, subject).encode())
        say(f"{order.report}: written")
    if order.thresholds is not None:
        write_thresholds(order, order.thresholds, config_bytes, found)
        say(f"{order.thresholds}: written")


async def _evaluate(
    config: Config, prompts: Sequence[Prompt], *, say: Callable[[str], None]
) -> Evaluation:
    unread = Metrics(CollectorRegistry(), fallback_metric="unread", routes=(), upstream_names=())
    async with running_embedding(config, unread, progress=say) as embedding:
        plan = compile_plan(config, embedding.utterances)
        cases: list[Case | None] = [None] * len(prompts)
        progress = Progress(len(prompts), say, clock=time.monotonic)
        todo = iter(enumerate(prompts))

        async def feed() -> None:
            for at, prompt in todo:
                started = time.perf_counter()
                decision = await _decide(plan, embedding, prompt.text)
                cases[at] = Case(prompt, decision, time.perf_counter() - started)
                progress.advance()

        started = time.perf_counter()
        # As many in flight as are embedded at once, so that a decision's time holds no queueing.
        await asyncio.gather(*(feed() for _ in range(embedding.parallel)))
        total_s = time.perf_counter() - started
    say(f"{len(prompts):,} prompts decided in {duration(total_s)}")
    decided = [case for case in cases if case is not None]
    return evaluate(
        decided,
        {route.name: route.utterances for route in config.routes},
        default=config.router.default,
        timing=timing(
            np.array([case.seconds for case in decided]),
            total_s=total_s,
            workers=embedding.parallel,
        ),
    )


async def _decide(plan: Plan, embedding: Embedding, text: str) -> RouteDecision:
    """The decision about a request with this text as its only message, by the code that serves it."""
    exchange = Exchange(plan)
    exchange.receive(_HEAD)
    body = {"messages": [{"role": "user", "content": text}]}
    action = exchange.receive(RequestBody(msgspec.json.encode(body)))
    if isinstance(action, NeedEmbedding):
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        action = exchange.receive(await embedding.embed(action.text, deadline))
    assert isinstance(action, Forward)
    return action.decision


class Progress:
    """Mutable: `_done`, and when the next line is due: often at first, seldom on a long run."""

    def __init__(
        self, total: int, say: Callable[[str], None], *, clock: Callable[[], float]
    ) -> None:
        self._total = total
        self._say = say
        self._clock = clock
        self._done = 0
        self._started = clock()
        self._due = self._started + _TELL_FIRST_S

    def advance(self) -> None:
        self._done += 1
        now = self._clock()
        if now < self._due:
            return
        elapsed_s = now - self._started
        self._due = now + min(max(_TELL_FIRST_S, elapsed_s / 10), _TELL_LAST_S)
        self._say(progress_line(self._done, self._total, elapsed_s))


def _as_json(found: Evaluation) -> str:
    plain = msgspec.to_builtins(found)
    if found.calibration is not None:
        plain["calibration"]["chosen"] = found.calibration.chosen.thresholds
    return json.dumps(plain, ensure_ascii=False, indent=2)


# --- files -----------------------------------------------------------------------------------------


def _check_targets(order: Order) -> None:
    """Before the work, not after it."""
    for target in (order.report, order.thresholds):
        if target is not None and not target.parent.is_dir():
            raise EvalError(f"{target}: there is no folder {target.parent}")
        if target is not None and target.is_dir():
            raise EvalError(f"{target}: is a folder; name a file")
    target = order.thresholds
    if target is not None and target.exists() and not target.samefile(order.config):
        # It may be the configuration that the person meant to edit.
        raise EvalError(
            f"{target}: exists, and is not the configuration that is evaluated ({order.config}); "
            f"name a new file, or add --config {target} to edit it in place"
        )


def write_thresholds(order: Order, target: Path, config_bytes: bytes, found: Evaluation) -> None:
    """`config_bytes`: the configuration as it was when it was evaluated."""
    if found.calibration is None:
        raise EvalError(f"{target}: not written: {NOT_CALIBRATED}")
    if target.exists() and _read(target) != config_bytes:
        raise EvalError(f"{target}: not written: it has changed meanwhile; run this again")
    try:
        text = with_thresholds(config_bytes.decode(), found.calibration.chosen.thresholds)
    except RewriteError as error:
        raise EvalError(f"{order.config}: {error}") from error
    parse(text, file=str(target), environ=None)
    _write(target, text.encode())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EvalError(f"{path}: cannot be read: {error.strerror}") from error


def _write(target: Path, content: bytes) -> None:
    """All of it or nothing, in the place of what a link points to, with the rights of what was there."""
    target = target.resolve()
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            with scratch.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, scratch)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise EvalError(f"{target}: cannot be written: {error.strerror}") from error
