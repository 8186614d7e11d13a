"""One HTTP exchange as a state machine: event -> action. It awaits nothing and knows no protocol.

Theory of operation. The transport feeds events as they arrive; `receive` answers each with exactly
one action, and the transport carries it out:

    RequestHeaders ─► Continue          the body is wanted
                   ─► Forward | Respond  the exchange is decided
    RequestBody    ─► Forward | Respond
                   ─► NeedEmbedding     resume with Embedded, Scored or NotEmbedded
    Embedded | Scored | NotEmbedded ─► Forward | Respond

A timeout, a full queue and a dead worker arrive as values (NotEmbedded), so that every degraded
path is a plain function call in a test. An event that the state does not allow is a bug of the
transport and raises IllegalEventError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import msgspec

from extproc.core import body as bodies
from extproc.core import wire_names
from extproc.core.body import Body, BodyError
from extproc.core.errors import (
    DUPLICATE_MODEL,
    EMPTY_BODY,
    INVALID_MESSAGES,
    INVALID_PROMPT,
    METHOD_NOT_ALLOWED,
    MODEL_NOT_FOUND,
    REQUEST_TOO_LARGE,
    TOO_DEEP,
    UNSUPPORTED_ENCODING,
    UNSUPPORTED_MEDIA_TYPE,
    ErrorKind,
    RouteReason,
    error_body,
)
from extproc.core.routing import (
    ModelDirectory,
    NamedRoute,
    NamedUpstream,
    RouteDecision,
    RouteScore,
    SemanticIndex,
    Vectors,
    decide_by_scores,
)
from extproc.core.signals import Checked, Facts, SignalTable

_EXPLAIN_PATH: Final = "/route"
_MODELS_PATH: Final = "/v1/models"
_UNROUTED: Final = "none"
_MAY_HOLD_MODEL: Final = (DUPLICATE_MODEL, INVALID_MESSAGES, TOO_DEEP)


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A chain as the sidecar sees it: upstream ids in order and the model each one serves."""

    name: str
    upstreams: tuple[str, ...]
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the router knows, compiled once from the configuration and the embedded utterances."""

    directory: ModelDirectory
    signals: SignalTable
    index: SemanticIndex
    default_route: str
    unknown_model_takes_default: bool
    route_chains: Mapping[str, ChainPlan]
    upstream_chains: Mapping[str, ChainPlan]
    max_body_bytes: int = 10 * 1024 * 1024
    """Envoy holds bodies to it, but for what was on its way when it said stop."""


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    method: str
    path: str
    content_type: str
    content_encoding: str
    end_of_stream: bool
    named: tuple[tuple[str, str], ...] = ()
    """Name and value of those of `SignalTable.headers` that there are."""


@dataclass(frozen=True, slots=True)
class RequestBody:
    raw: bytes


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: Vectors
    wait_s: float = 0.0
    """Until a worker took it."""
    embed_s: float = 0.0
    """In the worker."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores in place of vectors: remembered, or the static encoder's."""

    scores: tuple[RouteScore, ...]
    degraded: bool = False
    """The full encoder was wanted and could not answer in time."""
    wait_s: float = 0.0
    embed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NotEmbedded:
    reason: RouteReason


Event: TypeAlias = RequestHeaders | RequestBody | Embedded | Scored | NotEmbedded


@dataclass(frozen=True, slots=True)
class Continue:
    """Let the headers wait for the body."""


@dataclass(frozen=True, slots=True)
class NeedEmbedding:
    text: str


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer the client without any upstream."""

    status: int
    body: bytes
    code: str | None = None
    """The error's code; None for an answer that is no error."""

    @property
    def headers(self) -> dict[str, str]:
        return {
            "content-type": "application/json",
            wire_names.ROUTE: _UNROUTED,
            wire_names.REASON: RouteReason.LOCAL.value,
            wire_names.UPSTREAM: _UNROUTED,
            wire_names.MODEL: _UNROUTED,
            wire_names.ATTEMPTS: _UNROUTED,
        }


@dataclass(frozen=True, slots=True)
class Mutation:
    """What to change in the request on its way: headers to overwrite, and the body if not None."""

    headers: dict[str, str]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the request down a chain. `body` None: leave its bytes alone."""

    decision: RouteDecision
    chain: ChainPlan
    body: Body | None

    def mutation(self, *, skip: tuple[str, ...] = (), admission: str = "") -> Mutation:
        """Headers and body together: a header decision without its body would send `auto` on.

        `skip`: upstream ids that the gate holds shut; the body names the first one left, so that
        its tier has nothing to rewrite.
        """
        model = self.chain.models[0]
        for upstream, candidate in zip(self.chain.upstreams, self.chain.models, strict=True):
            if upstream not in skip:
                model = candidate
                break
        headers = {
            wire_names.CHAIN: self.chain.name,
            wire_names.ROUTE: self.decision.route,
            wire_names.REASON: self.decision.reason.value,
            wire_names.STREAM: "false",
            wire_names.WATCH: "1",
        }
        if skip:
            headers[wire_names.SKIP] = "," + ",".join(skip) + ","
        if admission:
            headers[wire_names.ADMISSION] = admission
        if self.body is None:
            return Mutation(headers, None)
        rewritten = bodies.with_model(self.body, model)
        headers[wire_names.MODEL] = model
        headers[wire_names.MODEL_SPAN] = f"{rewritten.offset}:{rewritten.length}"
        headers[wire_names.STREAM] = "true" if self.body.stream else "false"
        # Without it Envoy answers 500 to a body mutation in BUFFERED mode.
        headers["content-length"] = str(len(rewritten.raw))
        return Mutation(headers, rewritten.raw)


Action: TypeAlias = Continue | NeedEmbedding | Respond | Forward


class IllegalEventError(Exception):
    """The transport broke the order of events."""


class State(Enum):
    HEADERS = auto()
    BODY = auto()
    EMBEDDING = auto()
    DONE = auto()


_EXPECTED: Final[Mapping[State, tuple[type, ...]]] = {
    State.HEADERS: (RequestHeaders,),
    State.BODY: (RequestBody,),
    State.EMBEDDING: (Embedded, Scored, NotEmbedded),
    State.DONE: (),
}
_NEXT: Final[Mapping[type, State]] = {
    Continue: State.BODY,
    NeedEmbedding: State.EMBEDDING,
    Respond: State.DONE,
    Forward: State.DONE,
}


class Exchange:
    """Mutable state: `state`, and what earlier events left for later ones (`_head`, `_body`)."""

    __slots__ = ("_body", "_head", "_plan", "state")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._head: RequestHeaders | None = None
        self._body: Body | None = None
        self.state = State.HEADERS

    def receive(self, event: Event) -> Action:
        """The one action for this event; raise IllegalEventError when the state does not allow it."""
        if not isinstance(event, _EXPECTED[self.state]):
            raise IllegalEventError(f"{type(event).__name__} in state {self.state.name}")
        if isinstance(event, RequestHeaders):
            self._head = event
            action = self._on_headers(event)
        else:
            assert self._head is not None
            try:
                if isinstance(event, RequestBody):
                    action = self._on_body(self._head, event.raw)
                else:
                    assert self._body is not None
                    action = self._on_embedding(self._body, event)
            except BodyError as error:
                action = self._on_bad_body(self._head, error.kind)
        self.state = _NEXT[type(action)]
        return action

    def _on_headers(self, head: RequestHeaders) -> Action:
        path = _bare(head.path)
        if head.method == "GET" and (path == _MODELS_PATH or path.startswith(_MODELS_PATH + "/")):
            return _models(self._plan, unquote(path[len(_MODELS_PATH) + 1 :]))
        if path == _EXPLAIN_PATH and head.method != "POST":
            return _refuse(METHOD_NOT_ALLOWED)
        wants_model = head.method == "POST" and _wants_object(path)
        if head.end_of_stream:
            return _refuse(EMPTY_BODY) if wants_model else self._pass_through(RouteReason.DEFAULT)
        if wants_model:
            if head.content_encoding not in ("", "identity"):
                return _refuse(UNSUPPORTED_ENCODING)
            if not _is_json(head.content_type):
                return _refuse(UNSUPPORTED_MEDIA_TYPE)
        return Continue()

    def _on_body(self, head: RequestHeaders, raw: bytes) -> Action:
        path = _bare(head.path)
        if len(raw) > self._plan.max_body_bytes:
            return _refuse(REQUEST_TOO_LARGE)
        if not _is_json(head.content_type) or head.content_encoding not in ("", "identity"):
            return self._pass_through(RouteReason.DEFAULT)
        if not raw and not _wants_object(path):
            return self._pass_through(RouteReason.DEFAULT)
        self._body = body = bodies.parse(raw)
        if path == _EXPLAIN_PATH:
            text = bodies.prompt_text(body)
            if not text:
                return _refuse(INVALID_PROMPT)
            return self._decide_by_text(text, body)
        if body.model is None:
            if not _wants_object(path) and not body.has_model_member:
                return self._pass_through(RouteReason.DEFAULT)
            return self._decide_by_text(bodies.prompt_text(body), body)
        return self._decide_by_model(body.model, body)

    def _decide_by_model(self, model: str, body: Body) -> Action:
        target = self._plan.directory.find(model)
        if isinstance(target, NamedUpstream):
            decision = RouteDecision(wire_names.EXPLICIT_ROUTE, RouteReason.EXPLICIT)
            return Forward(decision, self._plan.upstream_chains[target.upstream], body)
        if isinstance(target, NamedRoute):
            return self._forward(RouteDecision(target.route, RouteReason.EXPLICIT), body)
        if target is None:
            if self._plan.unknown_model_takes_default:
                return self._forward(self._default(RouteReason.DEFAULT), body)
            known = ", ".join(self._plan.directory.names)
            return _refuse(MODEL_NOT_FOUND, f"The model does not exist here. Known: {known}.")
        return self._decide_by_text(bodies.prompt_text(body), body)

    def _decide_by_text(self, text: str, body: Body) -> Action:
        signals = self._plan.signals
        if not signals.is_empty:
            decision = signals.decide(self._facts(text, body))
            if decision is not None:
                return self._decided(decision, body)
        if self._plan.index.is_empty or not text or text.isspace():
            return self._decided(self._default(RouteReason.DEFAULT), body)
        return NeedEmbedding(text)

    def _facts(self, text: str, body: Body) -> Facts:
        assert self._head is not None
        signals = self._plan.signals
        enough = signals.enough_chars
        return Facts(
            text.encode("utf-8", "replace"),
            dict(self._head.named),
            bodies.text_chars(body, enough=enough) if enough else 0,
            bodies.contents(body) if signals.looks_inside else frozenset(),
        )

    def _on_embedding(self, body: Body, event: Event) -> Action:
        if isinstance(event, NotEmbedded):
            return self._decided(self._default(event.reason), body)
        if isinstance(event, Embedded):
            event = Scored(self._plan.index.scores(event.vectors))
        assert isinstance(event, Scored)
        decision = decide_by_scores(event.scores, default=self._plan.default_route)
        if event.degraded:
            decision = replace(decision, reason=RouteReason.DEGRADED_FAST)
        return self._decided(decision, body)

    def _on_bad_body(self, head: RequestHeaders, kind: ErrorKind) -> Action:
        # Where we cannot know what the provider takes, its own error is better than ours; but what
        # may hold an `auto` that we did not replace stays here.
        if _wants_object(_bare(head.path)) or kind in _MAY_HOLD_MODEL:
            return _refuse(kind)
        return self._pass_through(RouteReason.DEGRADED_BODY)

    def _default(self, reason: RouteReason) -> RouteDecision:
        return RouteDecision(self._plan.default_route, reason)

    def _decided(self, decision: RouteDecision, body: Body) -> Action:
        assert self._head is not None
        if _bare(self._head.path) == _EXPLAIN_PATH:
            checked = self._plan.signals.check(self._facts(bodies.prompt_text(body), body))
            return Respond(200, msgspec.json.encode(explain(self._plan, decision, checked)))
        return self._forward(decision, body)

    def _forward(self, decision: RouteDecision, body: Body | None) -> Forward:
        return Forward(decision, self._plan.route_chains[decision.route], body)

    def _pass_through(self, reason: RouteReason) -> Forward:
        return self._forward(self._default(reason), None)


def explain(plan: Plan, decision: RouteDecision, checked: Sequence[Checked]) -> dict[str, Any]:
    """A decision as plain data: what `POST /route` and `pointsman route --json` answer."""
    chain = plan.route_chains[decision.route]
    return {
        "route": decision.route,
        "model": chain.models[0],
        "upstreams": list(chain.upstreams),
        "reason": decision.reason.value,
        "matched": decision.matched,
        "signals": [
            {
                "route": each.route,
                "signal": each.reason.value,
                "priority": each.priority,
                "matched": each.matched,
            }
            for each in checked
        ],
        "scores": scores_as_data(decision.scores),
    }


def scores_as_data(scores: Sequence[RouteScore]) -> dict[str, dict[str, float]]:
    return {
        score.route: {"score": round(score.score, 4), "threshold": score.threshold}
        for score in scores
    }


def _models(plan: Plan, wanted: str) -> Respond:
    entries = [
        {"id": name, "object": "model", "created": 0, "owned_by": "pointsman"}
        for name in plan.directory.names
    ]
    if not wanted:
        return Respond(200, msgspec.json.encode({"object": "list", "data": entries}))
    for entry in entries:
        if entry["id"] == wanted:
            return Respond(200, msgspec.json.encode(entry))
    return _refuse(MODEL_NOT_FOUND)


def _refuse(kind: ErrorKind, message: str | None = None) -> Respond:
    return Respond(kind.status, error_body(kind, message=message), kind.code)


def _bare(path: str) -> str:
    bare = path.partition("?")[0]
    return bare.rstrip("/") or "/"


def _wants_object(path: str) -> bool:
    return path == _EXPLAIN_PATH or path.endswith(wire_names.MODEL_PATHS)


def _is_json(content_type: str) -> bool:
    """application/json, application/*+json, or none at all (many small clients send none)."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind in ("", "application/json", "text/json") or kind.endswith("+json")
