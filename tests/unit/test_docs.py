"""README.md and docs/architecture.md against the code, so that neither drifts."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from extproc.config import FallbackMode, parse
from extproc.core import errors, wire_names
from extproc.embedding.pool import RestartCause, SkipCause
from extproc.embedding.service import Fault
from extproc.metrics import Metrics

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(document, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", document, re.MULTILINE | re.DOTALL)[1]


def rows(text):
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def test_route_reasons_are_told():
    assert rows(section(README, "How a request is decided")) == set(errors.RouteReason)


def test_fallback_reasons_and_modes_are_told():
    told = rows(section(README, "When a model fails"))
    assert told == set(errors.FallbackReason) | set(FallbackMode)


def test_outcomes_are_told():
    assert rows(section(ARCHITECTURE, "Accounts")) == set(errors.Outcome)
    assert all(f"`{each}`" in section(README, "Metrics") for each in errors.Outcome)


def test_error_codes_are_told():
    kinds = {each.code for each in vars(errors).values() if isinstance(each, errors.ErrorKind)}
    text = section(README, "Endpoints")
    assert {code for code in kinds if f"`{code}`" not in text} == set()


def test_headers_between_the_parts_are_told():
    names = {
        value
        for key, value in vars(wire_names).items()
        if isinstance(value, str) and value.startswith(wire_names.PREFIX) and key != "PREFIX"
    }
    cells = re.findall(
        r"^\| (`[^|]+) \|", section(ARCHITECTURE, "Headers between the parts"), re.MULTILINE
    )
    told = {
        f"{wire_names.PREFIX}{name}" for cell in cells for name in re.findall(r"`([\w-]+)`", cell)
    }
    assert told == names


def test_toml_of_the_readme_is_accepted():
    (toml,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    parse(toml, file="README.md", environ={"BIG_API_KEY": "x"})


def test_links_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("envoy/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert link.startswith("http") or (document.parent / link).exists(), (document, link)


def test_metrics_are_told_with_their_labels():
    registry = CollectorRegistry()
    Metrics(registry, fallback_metric="model_fallback_total", routes=[], upstream_names=[])
    real = {}
    for collector in set(registry._names_to_collectors.values()):
        metric = next(iter(collector.describe()))
        suffix = "_total" if metric.type == "counter" else ""
        real[metric.name + suffix] = tuple(collector._labelnames)
    text = section(README, "Metrics")
    told = {
        name: tuple(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(\w+)` \| ([^|]*)\|", text, re.MULTILINE)
    }
    assert told == real
    assert all(f"`{cause}`" in text for cause in (*RestartCause, *SkipCause, *Fault))
