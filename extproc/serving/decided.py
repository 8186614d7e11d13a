"""What there is to tell about one decision once it is made; nobody is told unless somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from extproc.core.routing import RouteScore

SERVICE: Final = "pointsman-sidecar"
# Names of spans: the decision, and what is inside.
DECISION: Final = "decision"
QUEUE: Final = "queue"
EMBED: Final = "embed"
SCORE: Final = "score"

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"
"""Of the gRPC stream that asked; Envoy puts the trace context there."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Moments are loop.time() seconds."""

    began_s: float
    """The message that held what was decided on had arrived."""
    ended_s: float
    route: str
    reason: str
    code: str = ""
    """Of a refusal."""
    scores: tuple[RouteScore, ...] = ()
    embedding_ended_s: float | None = None
    """When the vectors were back; None: the model was not asked."""
    wait_s: float = 0.0
    embed_s: float = 0.0


Tell: TypeAlias = Callable[[Metadata, Decided], None]
