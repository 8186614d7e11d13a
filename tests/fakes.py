"""Stand-ins for time, the embedding pool and a small plan; nothing here waits or opens anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from extproc.core.errors import RouteReason
from extproc.core.exchange import ChainPlan, Embedded, NotEmbedded, Plan
from extproc.core.routing import ModelDirectory, RouteRule, SemanticIndex
from extproc.core.signals import SignalTable

CODE = [1.0, 0.0, 0.0]
CHAT = [0.0, 1.0, 0.0]
NOWHERE = [0.0, 0.0, 1.0]

RULES = (
    RouteRule("code", utterances=("write a function",), keywords=("traceback", "编译错误")),
    RouteRule("chat", utterances=("hello", "how are you")),
)


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeEmbedder:
    """Answers from a table, and remembers each (text, deadline) it was asked for."""

    def __init__(self, answers: Mapping[str, Sequence[float] | RouteReason | Exception]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, float]] = []

    async def __call__(self, text: str, deadline_s: float) -> Embedded | NotEmbedded:
        self.calls.append((text, deadline_s))
        answer = self.answers[text]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, RouteReason):
            return NotEmbedded(answer)
        return embedded(answer)


def embedded(*vectors: Sequence[float]) -> Embedded:
    return Embedded(np.asarray(vectors, np.float32))


def make_plan(
    rules: Sequence[RouteRule] = RULES, *, unknown_model_takes_default: bool = False
) -> Plan:
    """Two routes over two upstreams, `code` trying the coder first; `chat` is the default."""
    coder, general = ("coder", "coder-model"), ("general", "general-model")

    def chain(name: str, *upstreams: tuple[str, str]) -> ChainPlan:
        ids, models = zip(*upstreams, strict=True)
        return ChainPlan(name, ids, models)

    vectors = {"code": np.asarray([CODE], np.float32), "chat": np.asarray([CHAT] * 2, np.float32)}
    return Plan(
        directory=ModelDirectory(
            aliases=("auto",),
            upstreams={"coder": ("vllm-coder", "coder-model"), "general": ("g", "general-model")},
            routes=("code", "chat"),
        ),
        signals=SignalTable(rules),
        index=SemanticIndex(rules, vectors),
        default_route="chat",
        unknown_model_takes_default=unknown_model_takes_default,
        route_chains={
            "code": chain("route.code", coder, general),
            "chat": chain("route.chat", general, coder),
        },
        upstream_chains={
            "coder": chain("upstream.coder", coder, general),
            "general": chain("upstream.general", general),
        },
    )
