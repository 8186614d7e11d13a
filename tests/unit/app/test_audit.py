"""The equations of the audit, over numbers as both sides give them."""

from __future__ import annotations

from extproc.app.audit import Audit, as_json, as_text, weigh
from extproc.core.ledger import Reading
from extproc.serving.envoy_stats import EnvoyStats


def weighed(**changed: float) -> Audit:
    samples = {
        ("pointsman_requests_total", frozenset({("outcome", "served")})): 60.0,
        ("pointsman_requests_total", frozenset({("outcome", "failed")})): 5.0,
        ("pointsman_requests_unseen_total", frozenset({("cause", "bypassed")})): 3.0,
        ("pointsman_requests_unseen_total", frozenset({("cause", "record_lost")})): 2.0,
        ("pointsman_account_offset", frozenset({("of", "requests")})): 30.0,
        ("pointsman_account_offset", frozenset({("of", "bypassed")})): 1.0,
        ("pointsman_account_offset", frozenset({("of", "records")})): 40.0,
        ("pointsman_decisions_total", frozenset({("route", "a"), ("reason", "semantic")})): 50.0,
        (
            "pointsman_decisions_total",
            frozenset({("route", "a"), ("reason", "degraded_bypassed")}),
        ): 4.0,
        ("pointsman_internal_errors_total", frozenset[tuple[str, str]]()): 1.0,
        ("pointsman_records_total", frozenset({("kind", "request")})): 65.0,
        ("pointsman_records_lost_total", frozenset[tuple[str, str]]()): 5.0,
    }
    for name, value in changed.items():
        samples[f"pointsman_{name}_total", frozenset[tuple[str, str]]()] = value
    envoy = EnvoyStats(Reading("e", 102, 2, 7, 110), 100, 3, 4, 0)
    return weigh(envoy, samples)


def test_outcomes_unseen_and_offset_make_up_what_envoy_counted() -> None:
    found = weighed()
    assert [(check.what, check.difference) for check in found.checks] == [
        ("requests", 0),
        ("bypassed", 0),
        ("records", 0),
    ]
    assert found.adds_up
    assert "every request is accounted for" in as_text(found)
    assert as_json(found)["beside"]["requests under way"] == 2
    parts = as_json(found)["checks"][0]["parts"]
    assert parts == {"outcomes": 65, "unseen": 5, "offset": 30}


def test_difference_is_named() -> None:
    found = weighed(records_lost=4.0)
    assert not found.adds_up
    assert "does not add up: records (traffic did not pause" in as_text(found)
    assert as_json(found)["checks"][2]["difference"] == 1
