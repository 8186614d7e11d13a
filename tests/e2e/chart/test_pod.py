"""The chart's own pod, run by podman: real image, real Envoy, the manifests that Helm rendered.

It needs the image; `make image` builds it, and POINTSMAN_IMAGE names another.
"""

import asyncio
import os
import re
import signal
import time

import httpx
import pytest
from gateway import CHAT, ask, free_ports, scenario, until
from pods import ENVIRON, IMAGE, Pod, image_values, need_podman, podman, run_to_end

POD = "gw-pointsman"
CODE = "Write a Python function that reverses a linked list"
SETTLE_S, LIMIT_S = 2, 20


@pytest.fixture(scope="module")
def pod(helm4):
    need_podman()
    drain = {"drain": {"settleSeconds": SETTLE_S, "limitSeconds": LIMIT_S}}
    # podman has no Service: the tests' pods find the gateway's own port under its name.
    values = image_values() | drain | {"service": {"port": 8080}}
    manifests = helm4.manifests(values=values)
    ports = dict(zip(("http", "health"), free_ports(2), strict=True))
    pod = Pod(manifests, ports, name=POD)
    pod.manifests = manifests
    try:
        pod.start()
        yield pod
    finally:
        pod.remove()


@scenario
async def test_routes_and_falls_over(pod):
    async with httpx.AsyncClient(base_url=pod.url, timeout=10) as client:
        answer = await client.post(CHAT, json=ask(CODE))
        assert answer.status_code == 200
        assert answer.headers["x-pointsman-reason"] == "semantic"
        assert answer.headers["x-pointsman-upstream"] == "coder"
        pod.fault(18081, '{"kind":"5xx"}')
        answer = await client.post(CHAT, json=ask(CODE))
        pod.fault(18081, None)
    assert answer.status_code == 200
    assert answer.headers["x-pointsman-upstream"] == "general"
    assert answer.headers["x-pointsman-fallback"] == "5xx"


def test_image_is_under_its_limit_and_decides_under_overload(pod):
    """Besides the base: the real one is smaller than the stand-in that a machine without registry gets."""
    assert int(podman("image", "inspect", "-f", "{{.Size}}", IMAGE)) < 450e6
    metrics = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    text = podman("exec", f"{POD}-pointsman", "python3", "-c", metrics)
    assert "pointsman_static_encoder_ready 1.0" in text
    # What slimming took away is missed by nobody: a model of one's own is looked at with onnx.
    look = "import glob, onnx; print(len(onnx.load(glob.glob('/opt/pointsman/model/*.onnx')[0]).graph.node))"
    assert int(podman("exec", f"{POD}-pointsman", "python3", "-c", look)) > 10


def helm_test(pod, name):
    """One of the Pods that `helm test` makes: its exit code, and what it printed."""
    (manifest,) = (
        each for each in pod.manifests if each["metadata"]["name"] == name and each["kind"] == "Pod"
    )
    return run_to_end(manifest, pod.manifests, hosts={"gw-pointsman": pod.address})


def test_helm_test_sends_a_request_through_the_service(pod):
    code, said = helm_test(pod, "gw-pointsman-test")
    assert code == 0, said
    assert "x-pointsman-attempts: general:200" in said
    # Where no model answers, the rule does, with 200: no success.
    for port in (18081, 18082, 18083):
        pod.fault(port, '{"kind":"5xx"}')
    code, said = helm_test(pod, "gw-pointsman-test")
    for port in (18081, 18082, 18083):
        pod.fault(port, None)
    assert code == 1
    assert "no model answered, so the rule did" in said


def test_helm_test_runs_the_drill(pod):
    code, said = helm_test(pod, "gw-pointsman-test-drill")
    assert code == 0, said
    assert said.count("all 12 expectations held") == 2, said


def test_runs_as_nobody_on_a_read_only_root_with_metrics_and_admin_out_of_reach(pod):
    for container in ("pointsman", "envoy"):
        status = (f"/proc/{pod.pid(container)}/status",)
        with open(*status) as file:  # noqa: PTH123
            text = file.read()
        assert re.search(r"^Uid:\s+65532\s+65532\s+65532\s+65532$", text, re.MULTILINE)
        assert re.search(r"^CapEff:\s+0+$", text, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\s+1$", text, re.MULTILINE)
        assert pod.execute(container, "/bin/sh", "-c", ": > /tmp/x").returncode != 0
    inside = 'python3 -c "import socket; print(socket.gethostbyname(socket.gethostname()))"'
    address = pod.execute("pointsman", "/bin/sh", "-c", inside).stdout.strip()
    for port in (9901, 9464):
        script = f"import socket; socket.create_connection(('{address}', {port}), 2)"
        refused = pod.execute("demo-upstreams", "python3", "-c", script)
        assert "ConnectionRefusedError" in refused.stderr


@scenario
async def test_a_killed_sidecar_loses_no_request_and_comes_back(pod):
    answers, over = [], asyncio.Event()

    async def one(client):
        answers.append(await client.post(CHAT, json=ask(CODE)))

    async def load(client):
        running = []
        while not over.is_set():
            running.append(asyncio.create_task(one(client)))
            await asyncio.sleep(0.03)
        await asyncio.gather(*running)

    async def decided_again():
        return answers[-1].headers["x-pointsman-reason"] == "semantic"

    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as client:
        loading = asyncio.create_task(load(client))
        await until(lambda: len(answers) > 20, within_s=20)
        old = pod.pid("pointsman")
        os.kill(old, signal.SIGKILL)
        await until(
            lambda: any(
                each.headers["x-pointsman-reason"] == "degraded_bypassed" for each in answers
            ),
            within_s=20,
        )
        await until(decided_again, within_s=40)
        over.set()
        await loading
    assert {each.status_code for each in answers} == {200}
    assert pod.pid("pointsman") != old


@scenario
async def test_drains_what_is_in_flight_and_refuses_the_rest(pod):
    """Last, because the pod serves no more after it."""
    pod.fault(18081, '{"kind":"hang"}')
    async with (
        httpx.AsyncClient(base_url=pod.url, timeout=30) as client,
        httpx.AsyncClient(
            base_url=pod.url, timeout=30, limits=httpx.Limits(keepalive_expiry=None)
        ) as silent,
    ):
        assert (await silent.get("/v1/models")).headers.get("connection") != "close"
        # Waits 2 s for its first model: by then the listener is closed, and the next model is tried.
        envoy = await asyncio.create_subprocess_exec("podman", *pod.hook("envoy"), env=ENVIRON)
        sidecar = await asyncio.create_subprocess_exec(
            "podman", *pod.hook("pointsman"), env=ENVIRON
        )
        await asyncio.sleep(SETTLE_S / 2)
        began = time.monotonic()
        in_flight = asyncio.create_task(client.post(CHAT, json=ask(CODE)))
        await asyncio.sleep(0.2)
        welcome = await client.get("/v1/models")
        assert welcome.status_code == 200
        assert welcome.headers["connection"] == "close"

        async def refused():
            try:
                async with httpx.AsyncClient(base_url=pod.url, timeout=5) as fresh:
                    await fresh.get("/v1/models")
            except httpx.TransportError:
                return True
            return False

        await until(refused, within_s=10, every_s=0.1)
        assert not in_flight.done()
        answer = await in_flight
        # Nothing is in flight, but a client that nobody has told to leave may send at any time.
        await asyncio.sleep(SETTLE_S / 2)
        assert envoy.returncode is None
        late = await silent.get("/v1/models")
        assert late.status_code == 200
        assert late.headers["connection"] == "close"
    assert answer.status_code == 200
    assert answer.headers["x-pointsman-attempts"] == "coder:timeout,general:200"
    assert time.monotonic() - began > 1.5
    async with asyncio.timeout(LIMIT_S / 2):
        assert await envoy.wait() == 0
        assert await sidecar.wait() == 0
    podman("pod", "stop", "--time", "20", POD)
    codes = {name: pod.exit_code(name) for name in ("envoy", "pointsman")}
    assert codes == {"envoy": 0, "pointsman": 0}
