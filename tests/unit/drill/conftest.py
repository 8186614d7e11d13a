"""A gateway in miniature for drills without sockets: the real circuits, under a clock of its own."""

import dataclasses
import heapq
import itertools

import pytest

from extproc.config import parse
from extproc.core.circuit import CircuitPolicy, GateBank, State
from extproc.core.errors import FallbackReason
from extproc.drill.events import Answered, Ended, Look, Made, Mended, Sent, Totals, Visit
from extproc.drill.plan import DrillFault, plan

CONFIG = """
[upstream.primary]
name = "vllm-primary"
base_url = "http://127.0.0.1:9001"
model = "big"
inference_timeout = "500ms"
{first_token}
[upstream.fallback]
name = "vllm-fallback"
base_url = "http://127.0.0.1:9002"
model = "small"
inference_timeout = "800ms"
[circuit_breaker]
failure_threshold = 5
cooldown = "3s"
half_open_max_requests = 3
counted_errors = ["timeout", "5xx", "connect_error", "bad_schema"]
[retry]
max_retries = 0
"""
QUICK_S, HANG_S, REST_S, LOOK_S, RECORD_S = 0.004, 0.5, 1.0, 0.05, 0.02


def settings(fault, *, first_token=""):
    config = parse(CONFIG.format(first_token=first_token), file="x.toml", environ=None)
    return plan(config, "primary", DrillFault(fault), rps=10.0)


class Miniature:
    """`policy`: what the gateway does, when that is not what the setting says it should."""

    def __init__(self, setting, policy):
        self.setting = setting
        self.bank = GateBank(policy, {"primary": 4.0, "fallback": 4.0}, run="run")
        self.events = []
        self.agenda, self.order = [], itertools.count()
        self.now_s = 0.0
        self.broken_at_s = None
        self.asked = self.opened = 0
        self.entered = dict.fromkeys(State, 0)
        self.outcomes, self.fallbacks = {}, {}
        self.stopped = False

    def at(self, time_s, act, *arguments):
        heapq.heappush(self.agenda, (round(time_s, 6), next(self.order), act, arguments))

    def run(self):
        self.totals()
        self.at(0.0, self.send, 0)
        self.at(0.01, self.look)
        self.at(1.05, self.make)
        while self.agenda:
            self.now_s, _, act, arguments = heapq.heappop(self.agenda)
            act(*arguments)
        self.totals()
        return self.events

    def totals(self):
        total = sum(self.outcomes.values())
        self.events.append(
            Totals(self.now_s, dict(self.outcomes), dict(self.fallbacks), total, ejections=0)
        )

    def look(self):
        state = self.bank.state("primary", self.now_s)
        self.events.append(Look(self.now_s - 0.001, self.now_s, state, dict(self.entered)))
        if not self.stopped:
            self.at(self.now_s + LOOK_S, self.look)

    def make(self):
        self.broken_at_s = self.now_s
        self.asked = 0
        self.events.append(Made(self.now_s - 0.002, self.now_s))
        limit_s = self.setting.opens_within_s if self.setting.opens else self.setting.stays_closed_s
        self.at(self.now_s + LOOK_S, self.wait_to_mend, self.now_s + limit_s)

    def wait_to_mend(self, until_s):
        opened = self.entered[State.OPEN]
        if opened > self.opened:
            self.opened, until_s = opened, self.now_s + self.setting.trial_fails_within_s
        if opened > 1 or (opened and self.now_s > until_s):
            self.at(self.now_s + REST_S, self.mend)
        elif self.now_s > until_s:
            self.mend()
        else:
            self.at(self.now_s + LOOK_S, self.wait_to_mend, until_s)

    def mend(self):
        self.broken_at_s = None
        self.events.append(Mended(self.now_s - 0.002, self.now_s))
        self.at(self.now_s + LOOK_S, self.wait_to_stop, self.now_s + self.setting.back_within_s)

    def wait_to_stop(self, until_s):
        if self.bank.state("primary", self.now_s) is State.CLOSED or self.now_s > until_s:
            self.at(self.now_s + REST_S, self.stop)
        else:
            self.at(self.now_s + LOOK_S, self.wait_to_stop, until_s)

    def stop(self):
        self.stopped = True

    def send(self, serial):
        if self.stopped:
            return
        self.events.append(Sent(serial, self.now_s))
        self.at((serial + 1) / self.setting.rps, self.send, serial + 1)
        admission = self.bank.admit(("primary", "fallback"), self.now_s)
        self.moved(admission.transitions)
        if "primary" in admission.skip:
            self.fall_back(serial, self.now_s, FallbackReason.CIRCUIT_OPEN)
            return
        took_s, reason = self.visit()
        if reason is not FallbackReason.CONNECT_ERROR:
            self.events.append(Visit("primary", serial, self.now_s, "big"))
        self.at(self.now_s + took_s, self.visited, serial, self.now_s, reason, admission.ticket)

    def visit(self):
        """How long the upstream takes, and what it does instead of answering."""
        fault, broken = self.setting.fault, self.broken_at_s is not None
        self.asked += broken
        if not broken or (fault is DrillFault.FLAKY and not self.asked % 5):
            return QUICK_S, None
        if self.setting.reason is FallbackReason.TIMEOUT:
            return HANG_S, self.setting.reason
        return self.setting.first_token_delay_s if fault.value == "slow_first_token" else QUICK_S, (
            self.setting.reason
        )

    def visited(self, serial, sent_s, reason, ticket):
        if reason is None:
            cut = self.setting.fault is DrillFault.CUT_STREAM and self.broken_at_s is not None
            self.at(self.now_s + RECORD_S, self.succeeded, ticket)
            self.count("stream_cut" if cut else "served")
            ended = Ended.BROKEN if cut else Ended.WHOLE
            self.answer(serial, sent_s, ended, "vllm-primary", "", "vllm-primary:200")
            return
        self.at(self.now_s + RECORD_S, self.failed, reason, ticket)
        self.fall_back(serial, sent_s, reason)

    def fall_back(self, serial, sent_s, reason):
        self.fallbacks[reason.value] = self.fallbacks.get(reason.value, 0) + 1
        self.count("served_by_fallback")
        self.events.append(Visit("fallback", serial, self.now_s, "small"))
        attempts = f"vllm-primary:{reason},vllm-fallback:200"
        arguments = (serial, sent_s, Ended.WHOLE, "vllm-fallback", reason.value, attempts)
        self.at(self.now_s + QUICK_S, self.answer, *arguments)

    def count(self, outcome):
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def answer(self, serial, sent_s, ended, upstream, fallback, attempts):
        self.events.append(
            Answered(
                serial=serial,
                sent_s=sent_s,
                done_s=self.now_s,
                took_s=self.now_s - sent_s,
                status=200,
                ended=ended,
                upstream=upstream,
                fallback=fallback,
                attempts=attempts,
            )
        )

    def succeeded(self, ticket):
        self.moved(self.bank.succeeded("primary", ticket, self.now_s))

    def failed(self, reason, ticket):
        self.moved(self.bank.failed("primary", reason, ticket, self.now_s))

    def moved(self, transitions):
        for each in transitions:
            self.entered[each.after] += 1


@pytest.fixture
def setting_of():
    return settings


@pytest.fixture
def drilled():
    """A setting and the events of a drill; keywords change the policy that the gateway really has."""

    def run(fault="hang", *, first_token="", **policy: object):
        setting = settings(fault, first_token=first_token)
        real: CircuitPolicy = dataclasses.replace(setting.policy, **policy)
        return setting, Miniature(setting, real).run()

    return run
