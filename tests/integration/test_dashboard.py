"""A real Prometheus scrapes a real gateway with faults: every panel has data, every rule evaluates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml
from gateway import HOST, Gateway, ask, free_ports, gateway, scenario, until
from prometheus_tools import prometheus_tool, promtool

pytest.importorskip("grafana_foundation_sdk", reason="the extra `dashboard` builds the dashboard")

from extproc.observability import dashboard, rules

pytestmark = pytest.mark.envoy

CHART = Path(__file__).parents[2] / "helm" / "pointsman"

CONFIG = """
[circuit_breaker]
cooldown = "2s"

[router]
default = "chat"
deadline = "5s"

[[route]]
name = "chat"
upstreams = ["primary", "fallback"]

[[route]]
name = "code"
upstreams = ["fallback", "primary"]
utterances = ["write a python function", "fix this compiler error"]
"""
VARIABLES = {
    "$__rate_interval": "20s",
    "$__range": "1m",
    "$job": ".*",
    "$instance": ".*",
    "$fallback": dashboard.FALLBACK_DEFAULT,
}


def expressions() -> dict[str, str]:
    """Every query of the dashboard as it is written to the file, with its variables filled in."""
    found = {}
    for panel in json.loads(dashboard.document())["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            for variable, value in VARIABLES.items():
                expr = expr.replace(variable, value)
            assert "$" not in expr
            found[f"{panel['title']}: {target['legendFormat']}"] = expr
    return found


def test_every_expression_parses(tmp_path: Path) -> None:
    each = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(expressions().values())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": each}]}))
    assert f"{len(each)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


async def traffic(gw: Gateway) -> None:
    """Something of everything that a panel tells of."""

    async def some(*, stream: bool) -> None:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        texts = ("hello there", "write a python function", "how are you")
        await asyncio.gather(*(gw.chat(ask(text, **more)) for text in texts))

    for stream in (False, True, False, True):
        await some(stream=stream)
        await gw.chat(ask("hello", model="nobody-has-it"))
        await asyncio.sleep(0.5)
    for broken in (["primary"], ["primary", "fallback"]):
        for upstream in broken:
            await gw.fault(upstream, "5xx")
        for _ in range(4):
            await some(stream=True)
    for upstream in ("primary", "fallback"):
        await gw.fault(upstream, None)


@contextlib.asynccontextmanager
async def prometheus(directory: Path, jobs: dict[str, dict]) -> AsyncIterator[str]:
    """A Prometheus with our rules that reads each job twice a second."""
    binary = prometheus_tool("prometheus")
    (port,) = free_ports(1)
    (directory / "rules.yaml").write_text(rules.document(), encoding="utf-8")
    scrapes = [{"job_name": job, **scrape} for job, scrape in jobs.items()]
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": scrapes,
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [binary, f"--config.file={directory / 'prometheus.yaml'}", "--log.level=warn"]
    command += [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={HOST}:{port}"]
    running = subprocess.Popen(command)
    url = f"http://{HOST}:{port}"
    try:
        async with httpx.AsyncClient() as client:

            async def is_ready() -> bool:
                assert running.poll() is None
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get(f"{url}/-/ready")).status_code == 200
                return False

            await until(is_ready, within_s=30)
            yield url
    finally:
        running.terminate()
        running.wait(timeout=10)


async def ask_prometheus(client: httpx.AsyncClient, path: str, **params: str):
    answer = (await client.get(f"/api/v1/{path}", params=params)).json()
    assert answer["status"] == "success", answer
    return answer["data"]


@scenario
async def test_every_panel_has_data_and_every_rule_evaluates() -> None:
    prometheus_tool("prometheus")  # or skip, before a gateway is started
    (port,) = free_ports(1)
    async with gateway(CONFIG, metrics_keys=f'envoy_listen = "{HOST}:{port}"') as gw:
        chart = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
        jobs = {
            "gateway": {"static_configs": [{"targets": [f"{HOST}:{gw.metrics_port}"]}]},
            "gateway-envoy": {
                "metrics_path": "/stats/prometheus",
                "static_configs": [{"targets": [f"{HOST}:{port}"]}],
                "params": {"filter": [chart["podMonitor"]["envoyFilter"]]},  # it has all we ask for
            },
        }
        async with (
            prometheus(gw.directory, jobs) as url,
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):

            async def scraped() -> bool:
                return len((await ask_prometheus(client, "query", query="up == 1"))["result"]) == 2

            await until(scraped, within_s=20)  # what was counted before would not rise any more
            await traffic(gw)
            await asyncio.sleep(3)  # records travel, and both are scraped again
            found = {}
            for title, expr in expressions().items():
                data = await ask_prometheus(client, "query", query=expr)
                found[title] = [float(sample["value"][1]) for sample in data["result"]]
            empty = [title for title, values in found.items() if all(map(math.isnan, values))]
            assert empty == []
            missing = {
                title: values
                for title, values in found.items()
                if title.startswith("Envoy's total")
            }
            assert missing == {title: [0.0] for title in missing}
            assert len(missing) == 3

            (group,) = (await ask_prometheus(client, "rules"))["groups"]
            assert {rule["name"]: rule["health"] for rule in group["rules"]} == dict.fromkeys(
                [each.name for each in (*rules.RECORDS, *rules.ALERTS)], "ok"
            )
            # Half of the requests fell back, a quarter to the rule; the rest of the rules are content.
            pending = {rule["name"] for rule in group["rules"] if rule.get("alerts")}
            assert pending >= {"PointsmanFallbackShareHigh", "PointsmanRuleAnswers"}
            assert not pending & {
                "PointsmanSidecarAbsent",
                "PointsmanSidecarDown",
                "PointsmanSidecarBypassed",
                "PointsmanRequestLost",
                "PointsmanEnvoyUnreadable",
                "PointsmanInternalErrors",
            }
            scraped = (await gw.client.get(gw.metrics_url("/metrics"))).text
            assert promtool("check", "metrics", stdin=scraped) == ""
