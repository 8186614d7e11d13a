"""Records in, skips and transitions out: the gate between the access log, the circuits and the metrics."""

from __future__ import annotations

import pytest
from fakes import FakeClock
from prometheus_client import CollectorRegistry

from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.core.circuit import CircuitPolicy, GateBank
from extproc.metrics import Metrics
from extproc.serving.gate import Gate

CHAIN = ("a", "b")
NAMES = {"a": "vllm-a", "b": "vllm-b"}
POLICY = CircuitPolicy(failure_threshold=2, cooldown_s=30.0, half_open_max_requests=1)


class Gateway:
    """A gate with two upstreams, and the records that their requests would bring."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.registry = CollectorRegistry()
        metrics = Metrics(
            self.registry, fallback_metric="m", routes=[], upstream_names=NAMES.values()
        )
        bank = GateBank(POLICY, dict.fromkeys(NAMES, 5.0), run="r")
        self.gate = Gate(bank, upstream_names=NAMES, clock=self.clock, metrics=metrics)

    def admit(self) -> tuple[str, ...]:
        skip, self.admission = self.gate.admit(CHAIN)
        return skip

    def attempt(
        self, status: int, fail: str = "", *, upstream: str = "a", ended: bool = True
    ) -> None:
        self.gate.attempt_ended(
            AttemptRecord(upstream, status, frozenset(), fail, self.admission, ended=ended)
        )

    def request(self, attempts: str, *, skip: tuple[str, ...] = ()) -> None:
        self.gate.request_ended(
            RequestRecord(
                200, frozenset(), attempts=attempts, skip=frozenset(skip), admission=self.admission
            )
        )

    def fail_once(self) -> None:
        self.admit()
        self.attempt(504, "timeout")

    def open(self) -> None:
        self.fail_once()
        self.fail_once()
        assert self.admit() == ("a",)

    def half_open(self) -> None:
        self.open()
        self.clock.advance(POLICY.cooldown_s)

    def state(self, name: str = "vllm-a") -> float | None:
        return self.registry.get_sample_value("pointsman_circuit_state", {"upstream": name})

    def moves(self, to: str) -> float | None:
        labels = {"upstream": "vllm-a", "to": to}
        return self.registry.get_sample_value("pointsman_circuit_transitions_total", labels)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_closed_circuits_skip_nothing(gateway: Gateway) -> None:
    assert gateway.admit() == ()
    assert (gateway.state(), gateway.state("vllm-b")) == (0.0, 0.0)


def test_failures_up_to_the_threshold_open_the_circuit_and_are_told(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.fail_once()
    assert gateway.admit() == ()
    gateway.fail_once()
    assert gateway.admit() == ("a",)
    assert (gateway.state(), gateway.moves("open")) == (2.0, 1.0)
    assert caplog.messages == ["circuit of vllm-a: closed -> open (threshold)"]


def test_failures_that_are_not_counted_open_nothing(gateway: Gateway) -> None:
    for _ in range(5):
        gateway.admit()
        gateway.attempt(460, "rate_limited")
        gateway.attempt(460, "circuit_open")
        gateway.attempt(200)
    assert gateway.admit() == ()


def test_interim_records_of_one_failing_answer_count_once(gateway: Gateway) -> None:
    gateway.admit()
    for _ in range(5):
        gateway.attempt(502, "5xx", ended=False)
    gateway.attempt(502, "5xx")
    assert gateway.admit() == ()


def test_scrape_shows_an_elapsed_cooldown_without_traffic(gateway: Gateway) -> None:
    gateway.open()
    gateway.clock.advance(29.9)
    assert gateway.state() == 2.0
    gateway.clock.advance(0.2)
    assert gateway.state() == 1.0


def test_trial_at_a_time_is_let_through_and_its_success_closes(gateway: Gateway) -> None:
    gateway.half_open()
    assert gateway.admit() == ()
    trial = gateway.admission
    assert gateway.admit() == ("a",)
    gateway.admission = trial
    gateway.attempt(200)
    assert gateway.admit() == ()
    assert (gateway.state(), gateway.moves("closed")) == (0.0, 1.0)


def test_stream_of_a_trial_closes_at_its_headers(gateway: Gateway) -> None:
    gateway.half_open()
    gateway.admit()
    gateway.attempt(200, ended=False)
    assert gateway.state() == 0.0
    gateway.attempt(200)
    assert gateway.moves("closed") == 1.0


def test_trial_that_still_waits_for_its_headers_keeps_its_token(gateway: Gateway) -> None:
    gateway.half_open()
    gateway.admit()
    gateway.attempt(0, ended=False)
    assert gateway.admit() == ("a",)


def test_failed_trial_opens_again(gateway: Gateway) -> None:
    gateway.half_open()
    gateway.fail_once()
    assert gateway.admit() == ("a",)
    assert gateway.moves("open") == 2.0


def test_trial_whose_client_left_gives_its_token_back(gateway: Gateway) -> None:
    gateway.half_open()
    gateway.admit()
    gateway.attempt(0)
    assert gateway.admit() == ()


def test_trial_that_was_never_tried_gives_its_token_back_with_its_request(gateway: Gateway) -> None:
    gateway.half_open()
    gateway.admit()
    gateway.request("vllm-b:200")
    assert gateway.admit() == ()


def test_upstream_that_envoy_passed_over_is_open_at_once(gateway: Gateway) -> None:
    gateway.admit()
    gateway.request("vllm-a:circuit_open,vllm-b:200")
    assert gateway.admit() == ("a",)


def test_upstream_that_we_skipped_ourselves_tells_nothing(gateway: Gateway) -> None:
    gateway.admit()
    gateway.request("vllm-a:circuit_open,vllm-b:200", skip=("a",))
    assert gateway.admit() == ()


@pytest.mark.parametrize("admission", ["", "nonsense", "other.0", "r.999"])
def test_records_of_nobody_we_admitted_move_nothing(gateway: Gateway, admission: str) -> None:
    gateway.admission = admission
    for _ in range(5):
        gateway.attempt(504, "timeout")
        gateway.request("vllm-a:circuit_open,vllm-b:200")
    assert gateway.admit() == ()


def test_records_of_unknown_upstreams_move_nothing(gateway: Gateway) -> None:
    for _ in range(5):
        gateway.admit()
        gateway.attempt(504, "timeout", upstream="z")
        gateway.request("stranger:circuit_open,rule:200")
    assert gateway.admit() == ()


def test_circuits_are_told_by_name_with_the_countdown() -> None:
    gateway = Gateway()
    gateway.fail_once()
    assert gateway.gate.circuits()["vllm-a"].failures == 1
    gateway.fail_once()
    gateway.clock.advance(10)
    circuits = gateway.gate.circuits()
    assert (circuits["vllm-a"].state, circuits["vllm-a"].half_open_in_s) == ("open", 20.0)
    assert circuits["vllm-b"].state == "closed"
