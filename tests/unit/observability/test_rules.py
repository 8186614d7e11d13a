"""Alerts and runbooks belong together, and neither names what does not exist."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc import cli
from extproc.config import Fallback
from extproc.metrics import Metrics
from extproc.observability import rules

ROOT = Path(__file__).parents[3]
PAGES = {
    page.stem: page.read_text(encoding="utf-8")
    for page in (ROOT / rules.RUNBOOKS).glob("*.md")
    if page.name != "README.md"
}


def metrics() -> set[str]:
    registry = CollectorRegistry()
    made: Any = Metrics(registry, fallback_metric="x", routes=[], upstream_names=[])
    return set(made.registry._names_to_collectors)


def test_every_alert_has_a_page_and_no_page_is_without_alert() -> None:
    assert {alert.name for alert in rules.ALERTS} == PAGES.keys()


@pytest.mark.parametrize("name", PAGES)
def test_page_says_what_it_means_where_to_look_what_to_do_and_whether_it_can_wait(
    name: str,
) -> None:
    page = PAGES[name]
    assert page.startswith(f"# {name}\n")
    assert "**Impact.** " in page
    assert re.findall("^## (.*)$", page, re.MULTILINE) == ["Look", "Do", "Can it wait?"]
    assert "```" in page.partition("## Look")[2].partition("## Do")[0]


@pytest.mark.parametrize("name", PAGES)
def test_page_names_alerts_and_commands_that_exist(name: str) -> None:
    named = set(re.findall(r"\bPointsman[A-Z]\w+", PAGES[name]))
    assert named <= {alert.name for alert in rules.ALERTS}
    parser = cli._parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert set(re.findall(r"\bpointsman ([a-z]+[a-z-]*)", PAGES[name])) <= set(commands.choices)


def test_no_rule_asks_for_a_metric_of_ours_that_does_not_exist() -> None:
    asked = set(re.findall(r"(?<![:\w])pointsman_\w+", rules.document())) - {"pointsman_upstream"}
    assert asked <= metrics()
    assert Fallback().metric_prefix not in rules.document()  # an operator may call it otherwise
