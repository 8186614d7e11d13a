"""Decisions as spans in the trace that Envoy began; the only importer of opentelemetry.

It is imported when [tracing] is on and not before. Spans are made after the fact, from the moments
that the servicer kept, so that nothing here runs while a decision is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from extproc.serving.decided import DECISION, EMBED, QUEUE, SCORE, SERVICE, Decided, Metadata

_EXPORT_S: Final = 2.0
_EVERY_MS: Final = 1000
_QUEUE: Final = 4096
"""Spans beyond it are dropped: a receiver that hangs must not cost memory, let alone time."""


class Traces:
    """Owns the exporter's thread, from construction to `aclose`."""

    def __init__(
        self,
        *,
        endpoint: str,
        clock: Callable[[], float],
        exporter: SpanExporter | None = None,
    ) -> None:
        """`clock`: loop.time of the decisions."""
        self._clock = clock
        self._provider = TracerProvider(
            resource=Resource({"service.name": SERVICE}), shutdown_on_exit=False
        )
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=_EXPORT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_QUEUE, schedule_delay_millis=_EVERY_MS)
        )
        self._tracer = self._provider.get_tracer("pointsman")
        self._propagator = TraceContextTextMapPropagator()

    def tell(self, metadata: Metadata, decided: Decided) -> None:
        """Implements `Tell`: spans for a decision, if the trace that it belongs to is sampled."""
        parent = self._parent(metadata)
        if parent is None or not parent.trace_flags.sampled:
            return
        context = trace.set_span_in_context(NonRecordingSpan(parent))
        epoch_s = time.time() - self._clock()

        def ns(moment_s: float) -> int:
            return round((epoch_s + moment_s) * 1e9)

        attributes: dict[str, str | float] = {
            "pointsman.route": decided.route,
            "pointsman.reason": decided.reason,
            **({"pointsman.code": decided.code} if decided.code else {}),
            **{f"pointsman.score.{each.route}": round(each.score, 4) for each in decided.scores},
        }
        span = self._tracer.start_span(
            DECISION,
            context,
            SpanKind.SERVER,
            attributes=attributes,
            start_time=ns(decided.began_s),
        )
        inside = trace.set_span_in_context(span)
        for name, began_s, ended_s in _phases(decided):
            self._tracer.start_span(name, inside, start_time=ns(began_s)).end(ns(ended_s))
        if decided.reason.startswith("degraded_"):
            span.set_status(Status(StatusCode.ERROR, decided.reason))
        span.end(ns(decided.ended_s))

    async def aclose(self) -> None:
        """Send what is left, for a moment at most."""
        flush = asyncio.to_thread(self._provider.shutdown)
        try:
            await asyncio.wait_for(flush, 2 * _EXPORT_S)
        except TimeoutError:
            return

    def _parent(self, metadata: Metadata) -> SpanContext | None:
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        if "traceparent" not in carrier:
            return None
        context = trace.get_current_span(self._propagator.extract(carrier)).get_span_context()
        return context if context.is_valid else None


def _phases(decided: Decided) -> list[tuple[str, float, float]]:
    """The vectors' way: queue, worker, scores."""
    back_s = decided.embedding_ended_s
    if back_s is None:
        return []
    if not decided.embed_s:  # nobody embedded it: all the time was spent waiting
        return [(QUEUE, decided.began_s, back_s)]
    taken_s = max(back_s - decided.embed_s, decided.began_s)
    return [
        (QUEUE, max(taken_s - decided.wait_s, decided.began_s), taken_s),
        (EMBED, taken_s, back_s),
        (SCORE, back_s, decided.ended_s),
    ]
