"""The chart's own pod, run by podman: real image, real Envoy, the manifests that Helm rendered.

podman schedules no probes and calls no hooks, so the test calls them, as the manifest has them. It
needs the image; `make image` builds it, and POINTSMAN_IMAGE names another.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request

import httpx
import pytest
import yaml
from chart_tools import TOOLS, only
from gateway import CHAT, HOST, ask, free_ports, scenario, until

IMAGE = os.environ.get("POINTSMAN_IMAGE", "localhost/pointsman:0.1.0")
ENVOY_IMAGE = os.environ.get("POINTSMAN_ENVOY_IMAGE", "envoyproxy/envoy:v1.40.0")
ENVIRON = {"CONTAINERS_CONF": str(TOOLS / "containers.conf"), **os.environ}
"""What image.sh built with is what runs it."""
POD = "gw-pointsman"
CODE = "Write a Python function that reverses a linked list"
SETTLE_S, LIMIT_S = 2, 20


def podman(*arguments, check=True, stdin=None):
    done = subprocess.run(
        ["podman", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRON,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def playable(manifests, ports):
    """The Deployment as one Pod with its ports on loopback: what `podman kube play` 4.3 runs.

    It would restart an init container that has ended well under `restartPolicy: Always`, and takes
    no annotation of 64 characters.
    """
    deployment = only(manifests, "Deployment")
    template = deployment["spec"]["template"]
    spec = template["spec"] | {"restartPolicy": "OnFailure"}
    for container in spec["containers"]:
        for port in container.get("ports", []):
            port |= {"hostIP": HOST, "hostPort": ports[port["name"]]}
    metadata = {"name": POD, "labels": template["metadata"]["labels"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return yaml.safe_dump_all([only(manifests, "ConfigMap"), pod])


class Pod:
    def __init__(self, deployment, ports):
        self.url = f"http://{HOST}:{ports['http']}"
        self.health = f"http://{HOST}:{ports['health']}"
        spec = deployment["spec"]["template"]["spec"]
        self._containers = {each["name"]: each for each in spec["containers"]}

    def pid(self, container):
        return int(podman("inspect", "-f", "{{.State.Pid}}", f"{POD}-{container}"))

    def hook(self, container):
        """The container's preStop hook, as kubelet would call it."""
        command = self._containers[container]["lifecycle"]["preStop"]["exec"]["command"]
        return ["podman", "exec", f"{POD}-{container}", *command]

    def fault(self, port, body):
        """Set or clear a fault of a scripted model, which only the pod itself can reach."""
        method = "DELETE" if body is None else "POST"
        script = (
            "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method=sys.argv[2], "
            "data=sys.argv[3].encode() or None, headers={'content-type': 'application/json'}))"
        )
        url = f"http://{HOST}:{port}/demo/fault"
        podman("exec", f"{POD}-demo-upstreams", "python3", "-c", script, url, method, body or "")

    def probe(self, container, name):
        probe = self._containers[container][name]
        base = self.url if probe["httpGet"]["port"] == "http" else self.health
        try:
            with urllib.request.urlopen(base + probe["httpGet"]["path"], timeout=3) as response:
                return response.status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def pod(helm4):
    if shutil.which("podman") is None:
        pytest.skip("podman is missing: apt-get install podman buildah runc (see .ci/run)")
    for image in (IMAGE, ENVOY_IMAGE):
        if subprocess.run(
            ["podman", "image", "exists", image], check=False, env=ENVIRON
        ).returncode:
            pytest.skip(f"the image {image} is missing: run `make image`")
    repository, _, tag = IMAGE.rpartition(":")
    envoy_repository, _, envoy_tag = ENVOY_IMAGE.rpartition(":")
    values = {
        "image": {"repository": repository, "tag": tag},
        "envoy": {"image": {"repository": envoy_repository, "tag": envoy_tag}},
        "drain": {"settleSeconds": SETTLE_S, "limitSeconds": LIMIT_S},
    }
    manifests = helm4.manifests(values=values)
    ports = dict(zip(("http", "health"), free_ports(2), strict=True))
    podman("pod", "rm", "--force", "--ignore", POD)
    text = playable(manifests, ports)
    try:
        podman("kube", "play", "-", stdin=text)
        pod = Pod(only(manifests, "Deployment"), ports)
        deadline = time.monotonic() + 60
        while not (pod.probe("pointsman", "startupProbe") and pod.probe("envoy", "readinessProbe")):
            assert time.monotonic() < deadline, podman("pod", "logs", POD, check=False)
            time.sleep(0.2)
        yield pod
    finally:
        podman("pod", "rm", "--force", "--ignore", POD)


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


def test_runs_as_nobody_on_a_read_only_root_with_metrics_and_admin_out_of_reach(pod):
    for container in ("pointsman", "envoy"):
        status = (f"/proc/{pod.pid(container)}/status",)
        with open(*status) as file:  # noqa: PTH123
            text = file.read()
        assert re.search(r"^Uid:\s+65532\s+65532\s+65532\s+65532$", text, re.MULTILINE)
        assert re.search(r"^CapEff:\s+0+$", text, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\s+1$", text, re.MULTILINE)
        denied = subprocess.run(
            ["podman", "exec", f"{POD}-{container}", "/bin/sh", "-c", ": > /tmp/x"],
            capture_output=True,
            check=False,
            env=ENVIRON,
        )
        assert denied.returncode != 0
    inside = 'python3 -c "import socket; print(socket.gethostbyname(socket.gethostname()))"'
    address = podman("exec", f"{POD}-pointsman", "/bin/sh", "-c", inside)
    for port in (9901, 9464):
        script = f"import socket; socket.create_connection(('{address}', {port}), 2)"
        refused = subprocess.run(
            ["podman", "exec", f"{POD}-demo-upstreams", "python3", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRON,
        )
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
    async with httpx.AsyncClient(base_url=pod.url, timeout=30) as client:
        # Waits 2 s for its first model: by then the listener is closed, and the next model is tried.
        envoy = await asyncio.create_subprocess_exec(*pod.hook("envoy"), env=ENVIRON)
        sidecar = await asyncio.create_subprocess_exec(*pod.hook("pointsman"), env=ENVIRON)
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
    assert answer.status_code == 200
    assert answer.headers["x-pointsman-attempts"] == "coder:timeout,general:200"
    assert time.monotonic() - began > 1.5
    async with asyncio.timeout(LIMIT_S / 2):
        assert await envoy.wait() == 0
        assert await sidecar.wait() == 0
    podman("pod", "stop", "--time", "20", POD)
    codes = {
        name: podman("inspect", "-f", "{{.State.ExitCode}}", f"{POD}-{name}")
        for name in ("envoy", "pointsman")
    }
    assert codes == {"envoy": "0", "pointsman": "0"}
