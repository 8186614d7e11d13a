"""Envoy's own metrics as Prometheus gets them: the series that alerts and dashboard name, and no more."""

from __future__ import annotations

import asyncio

import pytest
from gateway import HOST, Gateway, free_ports, gateway, scenario

pytestmark = pytest.mark.envoy

PATH = "/stats/prometheus"


async def read(gw: Gateway, base: str) -> dict[str, float]:
    """As Prometheus reads it; prometheus_client would put a _total behind names of counters."""
    lines = (await gw.client.get(base + PATH)).text.splitlines()
    series = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in series}


@scenario
async def test_listener_serves_the_metrics_and_nothing_else_of_the_admin_interface():
    (port,) = free_ports(1)
    async with gateway(
        "[circuit_breaker]\nfailure_threshold = 1000\n",
        metrics_keys=f'envoy_listen = "{HOST}:{port}"',
    ) as gw:
        base = f"http://{HOST}:{port}"
        await gw.fault("primary", "5xx")
        await asyncio.gather(*(gw.chat() for _ in range(60)))
        overflow = "envoy_cluster_upstream_rq_retry_overflow"
        labels = 'pointsman_upstream="primary",envoy_cluster_name="hosts"'
        found = await read(gw, base)
        assert found[f"{overflow}{{{labels}}}"] > 0
        ingress = 'envoy_http_conn_manager_prefix="ingress"'
        assert found[f"envoy_http_downstream_rq_total{{{ingress}}}"] == 60
        assert found[f"envoy_http_ext_proc_failure_mode_allowed{{{ingress}}}"] == 0

        filtered = (await gw.client.get(f"{base}{PATH}?filter=^cluster.hosts")).text
        assert "envoy_cluster_upstream_rq_total" in filtered
        assert "envoy_http_" not in filtered
        for path in ("/", "/stats", "/quitquitquit", PATH + "/", PATH + "/../../quitquitquit"):
            for method in ("GET", "POST"):
                assert (await gw.client.request(method, base + path)).status_code == 404
        assert (await gw.client.post(base + PATH)).status_code == 404

        gw.kill_sidecar()  # then above all
        await gw.chat()
        found = await read(gw, base)
        assert found[f"envoy_http_ext_proc_failure_mode_allowed{{{ingress}}}"] == 1
