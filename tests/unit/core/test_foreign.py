"""One upstream a request: who gets it, what it carries, and what its answer proves."""

import json

import pytest
from fakes import make_plan

from extproc.core import accounts, foreign
from extproc.core.accounts import Verdict
from extproc.core.errors import FallbackReason, Outcome
from extproc.core.exchange import Exchange, Forward, RequestBody, RequestHeaders
from extproc.core.foreign import Answer

NAMES = {"coder": "vllm-coder", "general": "g"}
RESET = "upstream_reset_before_response_started"
PATH = "/v1/chat/completions"


def forward(model="code", **more) -> Forward:
    exchange = Exchange(make_plan())
    exchange.receive(RequestHeaders("POST", PATH, "application/json", "", end_of_stream=False))
    action = exchange.receive(RequestBody(json.dumps({"model": model, **more}).encode()))
    assert isinstance(action, Forward)
    return action


def visit(*, skip=(), has_rule=True, path=PATH, **more):
    return foreign.visit(
        forward(**more), NAMES, has_rule=has_rule, skip=skip, admission="run.0", path=path
    )


def test_first_upstream_of_the_chain_gets_the_request_with_its_own_model():
    mutation = visit().mutation()
    assert json.loads(mutation.body) == {"model": "coder-model"}
    assert mutation.headers == {
        "x-pointsman-chain": "route.code",
        "x-pointsman-route": "code",
        "x-pointsman-reason": "explicit",
        "x-pointsman-upstream": "vllm-coder",
        "x-pointsman-model": "coder-model",
        "content-length": str(len(mutation.body)),
    }


def test_an_open_circuit_sends_it_to_the_next_and_the_story_says_so():
    chosen = visit(skip=("coder",))
    mutation = chosen.mutation()
    assert json.loads(mutation.body) == {"model": "general-model"}
    assert mutation.headers["x-pointsman-upstream"] == "g"
    story = chosen.story(Answer(200, "via_upstream"))
    assert story["x-pointsman-attempts"] == "vllm-coder:circuit_open,g:200"
    assert story["x-pointsman-fallback"] == "circuit_open"
    record = chosen.request(Answer(200, "via_upstream"))
    assert accounts.outcome(record) is Outcome.SERVED_BY_FALLBACK
    (hop,) = accounts.hops(record.attempts)
    assert (hop.source, hop.target) == ("vllm-coder", "g")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(200, "via_upstream"), None),
        (Answer(200), None),
        (Answer(400, "via_upstream"), None),
        (Answer(429, "via_upstream"), FallbackReason.RATE_LIMITED),
        (Answer(500, "via_upstream"), FallbackReason.SERVER_ERROR),
        (Answer(504, "via_upstream"), FallbackReason.SERVER_ERROR),
        (Answer(503), FallbackReason.SERVER_ERROR),
        (Answer(504), FallbackReason.TIMEOUT),
        (Answer(504, "response_timeout"), FallbackReason.TIMEOUT),
        (Answer(504, "upstream_per_try_timeout"), FallbackReason.TIMEOUT),
        (Answer(503, f"{RESET}{{connection_timeout}}"), FallbackReason.CONNECT_ERROR),
        (Answer(503, f"{RESET}{{remote_connection_failure}}"), FallbackReason.CONNECT_ERROR),
        (Answer(503, f"{RESET}{{overflow}}"), FallbackReason.OVERFLOW),
        (Answer(503, "no_healthy_upstream"), FallbackReason.CIRCUIT_OPEN),
    ],
)
def test_why_an_upstream_did_not_answer(answer, reason):
    assert foreign.failure(answer) is reason
    record = visit().attempt(answer)
    assert record.fail == (reason.value if reason else "")
    expected = Verdict.FAILED if reason else Verdict.SUCCEEDED
    if reason is FallbackReason.CIRCUIT_OPEN:
        expected = Verdict.NOTHING
    assert accounts.verdict(record) is expected


@pytest.mark.parametrize("details", ["route_not_found", "request_payload_too_large"])
def test_a_4xx_of_that_envoy_itself_says_nothing_of_the_upstream(details):
    assert accounts.verdict(visit().attempt(Answer(404, details))) is Verdict.NOTHING


def test_an_upstream_whose_hosts_are_all_ejected_is_told_as_passed_over():
    record = visit().request(Answer(503, "no_healthy_upstream"))
    assert accounts.passed_over(record) == ["vllm-coder"]
    assert accounts.outcome(record) is Outcome.FAILED


def test_a_client_that_left_proves_nothing_and_is_counted_as_gone():
    chosen = visit()
    assert accounts.verdict(chosen.attempt(None)) is Verdict.NOTHING
    assert accounts.outcome(chosen.request(None)) is Outcome.CLIENT_GONE
    assert chosen.request(None).attempts == "vllm-coder:"


def test_with_every_circuit_open_the_rule_answers():
    chosen = visit(skip=("coder", "general"), stream=True)
    assert chosen.upstream is None
    reply = foreign.last_resort(chosen, "busy", stream=True, id_="1", created=1)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.headers["x-pointsman-upstream"] == "rule"
    assert reply.headers["x-pointsman-attempts"] == (
        "vllm-coder:circuit_open,g:circuit_open,rule:200"
    )
    assert accounts.outcome(chosen.request(Answer(200))) is Outcome.SERVED_BY_RULE


@pytest.mark.parametrize(
    ("has_rule", "path", "name"), [(True, "/v1/embeddings", "rule"), (False, PATH, "none")]
)
def test_where_no_rule_can_answer_the_error_is_honest(has_rule, path, name):
    chosen = visit(skip=("coder", "general"), has_rule=has_rule, path=path)
    reply = foreign.last_resort(chosen, "busy", stream=False, id_="1", created=1)
    assert reply.status == 503
    assert json.loads(reply.body)["error"]["code"] == reply.code == "no_upstream_available"
    assert reply.headers["x-pointsman-upstream"] == name
    assert accounts.outcome(chosen.request(Answer(503))) is Outcome.FAILED
