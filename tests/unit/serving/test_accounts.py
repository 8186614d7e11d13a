"""The access log service over messages as Envoy frames them: every record counts once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry

from extproc.core.accounts import AttemptRecord, RequestRecord
from extproc.metrics import Metrics
from extproc.serving import wire
from extproc.serving.accounts import AccessLog, Accounts


class Seen:
    """An observer that remembers, and the registry beside it."""

    def __init__(self, *messages: Any) -> None:
        self.attempts: list[AttemptRecord] = []
        self.requests: list[RequestRecord] = []
        self.registry = CollectorRegistry()
        metrics = Metrics(
            self.registry,
            fallback_metric="model_fallback_total",
            routes=["code"],
            upstream_names=["vllm-a", "vllm-b", "rule"],
        )
        names = {"a": "vllm-a", "b": "vllm-b"}
        accounts = Accounts(metrics=metrics, observer=self, upstream_names=names)
        log = AccessLog(accounts, metrics=metrics)

        async def stream() -> AsyncIterator[Any]:
            for message in messages:
                yield message

        self.reply = asyncio.run(log.StreamAccessLogs(stream(), None))

    def attempt_ended(self, record: AttemptRecord) -> None:
        self.attempts.append(record)

    def request_ended(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def message(
    *statuses: int, name: str = "", headers: dict[str, str] | None = None, seconds: int = 0
) -> Any:
    built = wire.AccessLogMessage()
    if name:
        built.identifier.log_name = name
    for status in statuses:
        entry = built.http_logs.log_entry.add()
        entry.response.response_code.value = status
        entry.response.response_headers.update(headers or {})
        # What Envoy's filters leave on every request that they see.
        entry.common_properties.metadata.filter_metadata["pointsman"].update({"admitted": True})
        entry.request.request_headers.update(
            {"x-pointsman-route": "code", "x-pointsman-reason": "keyword"}
        )
        if seconds:
            entry.common_properties.time_to_first_upstream_rx_byte.seconds = seconds
    return built


FELL_BACK = {
    "x-pointsman-upstream": "vllm-b",
    "x-pointsman-fallback": "timeout",
    "x-pointsman-attempts": "vllm-a:timeout,vllm-b:200",
}


def test_every_request_counts_under_its_outcome_route_and_steps() -> None:
    seen = Seen(message(200, 200, name="request", headers=FELL_BACK), message(404))
    assert len(seen.requests) == 3
    assert seen.count("pointsman_requests_total", outcome="served_by_fallback") == 2
    assert seen.count("pointsman_requests_total", outcome="rejected") == 1
    assert seen.count("pointsman_decisions_total", route="code", reason="keyword") == 3
    steps = {"reason": "timeout", "from": "vllm-a", "to": "vllm-b"}
    assert seen.count("model_fallback_total", **steps) == 2
    assert isinstance(seen.reply, wire.AccessLogResponse)


def test_name_of_the_log_holds_for_the_whole_stream() -> None:
    seen = Seen(message(200, name="attempt.a"), message(200), message(200))
    assert [record.upstream for record in seen.attempts] == ["a", "a", "a"]


def test_stream_without_a_name_counts_nothing() -> None:
    seen = Seen(message(200))
    assert (seen.attempts, seen.requests) == ([], [])


def test_time_to_headers_counts_once_for_each_attempt_that_was_answered() -> None:
    streaming = message(200, seconds=1)
    streaming.http_logs.log_entry[0].common_properties.access_log_type = 5  # DownstreamPeriodic
    failed = message(502, headers={"x-pointsman-fail": "5xx"}, seconds=1)
    seen = Seen(message(200, name="attempt.a", seconds=1), streaming, failed, message(0))
    assert seen.count("pointsman_time_to_headers_seconds_count", upstream="vllm-a") == 1
    assert [record.ended for record in seen.attempts] == [True, False, True, True]


def test_attempts_on_unknown_upstreams_are_nobodys() -> None:
    seen = Seen(message(200, name="attempt.z", seconds=1))
    assert seen.attempts == []
    assert "z" not in {
        sample.labels.get("upstream")
        for metric in seen.registry.collect()
        for sample in metric.samples
    }
