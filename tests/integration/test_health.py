"""The probes' listener of their own: /healthz and /readyz, and no metrics."""

import httpx
import pytest
from gateway import HOST, free_ports
from prometheus_client import CollectorRegistry

from extproc.serving.admin import AdminServer, Health


@pytest.fixture
def served():
    metrics_port, probes_port = free_ports(2)
    health = Health()
    server = AdminServer(
        host=HOST,
        port=metrics_port,
        registry=CollectorRegistry(),
        health=health,
        probes=(HOST, probes_port),
    )
    server.start()
    yield health, f"http://{HOST}:{metrics_port}", f"http://{HOST}:{probes_port}"
    server.stop()


def test_probes_answer_in_both_places_and_metrics_in_one(served):
    health, metrics, probes = served
    for base in (metrics, probes):
        assert httpx.get(f"{base}/healthz").status_code == 200
        assert httpx.get(f"{base}/readyz").status_code == 503
    health.ready = True
    assert httpx.get(f"{probes}/readyz").text == "ok\n"
    health.condition = lambda: "connect_error"
    ready = httpx.get(f"{probes}/readyz")
    assert ready.status_code == 200, "without its embedding service a sidecar serves, and says so"
    assert ready.text == "ok, without the embedding service: connect_error\n"
    assert httpx.get(f"{metrics}/metrics").status_code == 200
    assert httpx.get(f"{probes}/metrics").status_code == 404


def test_a_taken_port_is_the_callers_error_and_leaves_nothing_open(served):
    _, metrics, _ = served
    taken = int(metrics.rpartition(":")[2])
    (free,) = free_ports(1)
    server = AdminServer(
        host=HOST, port=free, registry=CollectorRegistry(), health=Health(), probes=(HOST, taken)
    )
    with pytest.raises(OSError, match="address already in use"):
        server.start()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{HOST}:{free}/healthz")
