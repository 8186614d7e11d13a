"""A request under an Envoy that is not ours: where it goes, what it carries, what its answer proves. Pure.

Such an Envoy has neither our chains nor our tiers. One upstream is chosen before the request
leaves: its model stands in the body, and a route of that Envoy matches its name in
`x-pointsman-upstream`. Whatever that Envoy tries again goes to the same upstream, so the final
answer's headers say all there is to know of it, and they come back on the stream that decided.
The next upstream of a chain gets its turn when the circuit of the one before it is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from extproc.core import rule, wire_names
from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.core.errors import NO_UPSTREAM, FallbackReason, error_body
from extproc.core.exchange import Forward, Mutation

# Envoy's response code details: where a status came from.
_VIA_UPSTREAM: Final = "via_upstream"
_NO_HOST: Final = "no_healthy_upstream"
_RESET: Final = "upstream_reset_before_response_started"

_CARRIED: Final = (
    wire_names.CHAIN,
    wire_names.ROUTE,
    wire_names.REASON,
    wire_names.MODEL,
    "content-length",
)
"""Of what a chain of ours gets, what means something elsewhere, too."""
_NOBODY: Final = "none"
CLIENT_LEFT: Final = frozenset({"downstream_remote_reset"})
"""As our own Envoy would flag it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The final answer's headers, as that Envoy sends them back."""

    status: int
    details: str = ""
    """Envoy's response code details; empty where it does not tell them."""
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class Visit:
    """A request and the one upstream that it goes to; `upstream` None: every circuit is open."""

    forward: Forward
    upstream: str | None
    name: str
    """How the upstream is called in headers and metrics."""
    model: str
    passed_over: tuple[str, ...]
    """Names of the upstreams in front of it."""
    skip: tuple[str, ...] = ()
    admission: str = ""
    method: str = ""
    path: str = ""
    request_id: str = ""

    def mutation(self) -> Mutation:
        ours = self.forward.mutation(skip=self.skip)
        headers = {name: ours.headers[name] for name in _CARRIED if name in ours.headers}
        return Mutation(headers | {wire_names.UPSTREAM: self.name}, ours.body)

    def story(self, answer: Answer | None) -> dict[str, str]:
        """The response headers, as a client of our own Envoy gets them; None: it did not wait."""
        failed = None if answer is None else failure(answer)
        result = "" if answer is None else failed.value if failed else str(answer.status)
        told = {
            wire_names.ROUTE: self.forward.decision.route,
            wire_names.REASON: self.forward.decision.reason.value,
            wire_names.UPSTREAM: self.name,
            wire_names.MODEL: self.model,
            wire_names.ATTEMPTS: ",".join(
                [
                    *(f"{name}:{FallbackReason.CIRCUIT_OPEN.value}" for name in self.passed_over),
                    *([] if self.name == _NOBODY else [f"{self.name}:{result}"]),
                ]
            ),
        }
        if self.passed_over:
            told[wire_names.FALLBACK] = FallbackReason.CIRCUIT_OPEN.value
        elif failed:
            told[wire_names.FALLBACK] = failed.value
        return told

    def attempt(self, answer: Answer | None, *, took_s: float | None = None) -> AttemptRecord:
        """What the visit says of its upstream; None: the client left before there was an answer."""
        assert self.upstream is not None
        told = answer is not None and was_asked(answer)
        failed = failure(answer) if answer is not None else None
        return AttemptRecord(
            upstream=self.upstream,
            status=answer.status if answer is not None and told else 0,
            flags=CLIENT_LEFT if answer is None else frozenset(),
            fail=failed.value if failed else "",
            admission=self.admission,
            time_to_headers_s=took_s,
            route=self.forward.decision.route,
            is_stream=answer is not None and answer.is_stream,
        )

    def request(
        self, answer: Answer | None, *, took_s: float | None = None, ended_s: float | None = None
    ) -> RequestRecord:
        """What became of the request; of a body that breaks off later nothing is known."""
        story = self.story(answer)
        return RequestRecord(
            status=answer.status if answer is not None else 0,
            flags=CLIENT_LEFT if answer is None else frozenset(),
            route=story[wire_names.ROUTE],
            reason=story[wire_names.REASON],
            upstream=self.name,
            attempts=story[wire_names.ATTEMPTS],
            fallback=story.get(wire_names.FALLBACK, ""),
            skip=frozenset(self.skip),
            admission=self.admission,
            request_id=self.request_id,
            method=self.method,
            path=self.path,
            duration_s=took_s,
            ended_s=ended_s,
        )


def visit(
    forward: Forward,
    names: Mapping[str, str],
    *,
    has_rule: bool,
    skip: tuple[str, ...] = (),
    admission: str = "",
    method: str = "",
    path: str = "",
    request_id: str = "",
) -> Visit:
    """To the first upstream of the chain that the gate does not hold shut. `names`: id -> name."""
    passed_over: list[str] = []
    chosen = None
    name, model = (wire_names.RULE, rule.MODEL) if has_rule else (_NOBODY, _NOBODY)
    for upstream, its_model in zip(forward.chain.upstreams, forward.chain.models, strict=True):
        if upstream not in skip:
            chosen, name, model = upstream, names[upstream], its_model
            break
        passed_over.append(names[upstream])
    return Visit(
        forward=forward,
        upstream=chosen,
        name=name,
        model=model,
        passed_over=tuple(passed_over),
        skip=skip,
        admission=admission,
        method=method,
        path=path,
        request_id=request_id,
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that the sidecar gives itself."""

    status: int
    body: bytes
    headers: dict[str, str]
    code: str | None = None


def last_resort(visit: Visit, text: str, *, stream: bool, id_: str, created: int) -> Reply:
    """What a request gets whose every upstream has an open circuit: the rule's answer, where there
    is a rule (`text`) and the path takes one. `created`: seconds since 1970.
    """
    said = None
    if visit.name == wire_names.RULE:
        said = rule.answer(visit.path, text, stream=stream, id_=id_, created=created)
    if said is None:
        kind, body, status = "application/json", error_body(NO_UPSTREAM), NO_UPSTREAM.status
    else:
        (kind, body), status = said, 200
    headers = {"content-type": kind, **visit.story(Answer(status))}
    return Reply(status, body, headers, NO_UPSTREAM.code if said is None else None)


def failure(answer: Answer) -> FallbackReason | None:
    """Why the upstream did not give the answer; None where it did, or was not asked."""
    if answer.details == _NO_HOST:
        return FallbackReason.CIRCUIT_OPEN  # that Envoy has ejected every host of it
    if answer.details.startswith(_RESET):
        overflow = "overflow" in answer.details
        return FallbackReason.OVERFLOW if overflow else FallbackReason.CONNECT_ERROR
    if answer.status == 504 and answer.details != _VIA_UPSTREAM:
        return FallbackReason.TIMEOUT
    if answer.status == 429:
        return FallbackReason.RATE_LIMITED
    return FallbackReason.SERVER_ERROR if answer.status >= 500 else None


def was_asked(answer: Answer) -> bool:
    """Whether a status says something of the upstream: that Envoy's own 4xx does not."""
    return answer.details in ("", _VIA_UPSTREAM) or failure(answer) is not None
