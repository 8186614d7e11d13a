"""The chart's pods run by podman, ended as a kubelet ends them; it judges nothing.

podman schedules no probes, calls no hooks and knows no Services, so what a test needs of these is
done here, from the manifests as Helm rendered them.
"""

import asyncio
import contextlib
import copy
import os
import shutil
import subprocess
import time
import urllib.request

import pytest
import yaml
from chart_tools import TOOLS, only
from gateway import HOST

IMAGE = os.environ.get("POINTSMAN_IMAGE", "localhost/pointsman:0.1.0")
ENVOY_IMAGE = os.environ.get("POINTSMAN_ENVOY_IMAGE", "envoyproxy/envoy:v1.40.0")
ENVIRON = {"CONTAINERS_CONF": str(TOOLS / "containers.conf"), **os.environ}
"""What image.sh built with is what runs it."""
START_S = 60


def need_podman():
    """Skip the test where it cannot run."""
    if shutil.which("podman") is None:
        pytest.skip("podman is missing: apt-get install podman buildah runc (see .ci/run)")
    for image in (IMAGE, ENVOY_IMAGE):
        if subprocess.run(
            ["podman", "image", "exists", image], check=False, env=ENVIRON
        ).returncode:
            pytest.skip(f"the image {image} is missing: run `make image`")


def image_values():
    repository, _, tag = IMAGE.rpartition(":")
    envoy_repository, _, envoy_tag = ENVOY_IMAGE.rpartition(":")
    return {
        "image": {"repository": repository, "tag": tag},
        "envoy": {"image": {"repository": envoy_repository, "tag": envoy_tag}},
    }


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


async def podman_async(*arguments):
    """The exit code."""
    process = await asyncio.create_subprocess_exec(
        "podman", *arguments, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return await process.wait()


def create(spec, manifests, *, name, labels=None):
    """Make one Pod, and the ConfigMap that it mounts, with what podman 4.3 needs changed.

    It makes a volume of the machine from each emptyDir and ConfigMap, by its name alone: they get
    the pod's. It takes no annotation of 64 characters, and knows no native sidecars: containers of
    all kinds become plain ones, and `start` keeps their order.
    """
    config = only(manifests, "ConfigMap")
    spec = copy.deepcopy(spec)
    spec["containers"] = [*spec.pop("initContainers", ()), *spec["containers"]]
    spec["restartPolicy"] = "Never" if spec.get("restartPolicy") == "Never" else "OnFailure"
    names = {each["name"]: f"{name}-{each['name']}" for each in spec["volumes"]}
    for volume in spec["volumes"]:
        volume["name"] = names[volume["name"]]
        if volume.get("configMap", {}).get("name") == config["metadata"]["name"]:
            volume["configMap"]["name"] = name
    for container in spec["containers"]:
        container.pop("restartPolicy", None)
        for mount in container.get("volumeMounts", ()):
            mount["name"] = names[mount["name"]]
    config = config | {"metadata": {"name": name}}
    metadata = {"name": name, "labels": labels or {}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    remove(name)
    podman("kube", "play", "--start=false", "-", stdin=yaml.safe_dump_all([config, pod]))


def start(spec, *, name, is_started):
    """As a kubelet does: each init container to its end, each native sidecar until it has started,
    then the rest at once. `is_started(container)` asks the startup probe."""
    for container in spec.get("initContainers", ()):
        full = f"{name}-{container['name']}"
        podman("start", full)
        if container.get("restartPolicy") != "Always":
            assert podman("wait", full) == "0", podman("logs", full, check=False)
            continue
        deadline = time.monotonic() + START_S
        while not is_started(container["name"]):
            assert time.monotonic() < deadline, podman("logs", full, check=False)
            time.sleep(0.2)
    podman("start", *(f"{name}-{each['name']}" for each in spec["containers"]))


def run_to_end(manifest, manifests, *, hosts=None):
    """A Pod of one container that ends: its exit code, and all that it printed.

    `hosts`: names that it can resolve, each with its address; a cluster's DNS does that.
    """
    name, spec = manifest["metadata"]["name"], copy.deepcopy(manifest["spec"])
    aliases = [{"ip": ip, "hostnames": [host]} for host, ip in (hosts or {}).items()]
    (container,) = (each["name"] for each in spec["containers"])
    try:
        create(spec | {"hostAliases": aliases}, manifests, name=name)
        start(spec, name=name, is_started=None)
        code = int(podman("wait", f"{name}-{container}"))
        done = subprocess.run(
            ["podman", "logs", f"{name}-{container}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            env=ENVIRON,
        )
        return code, done.stdout
    finally:
        remove(name)


def remove(name):
    podman("pod", "rm", "--force", "--ignore", name)
    volumes = podman("volume", "ls", "-q", "--filter", f"name=^{name}(-|$)")
    if volumes:
        podman("volume", "rm", *volumes.split())


class Pod:
    """One pod of the Deployment, its ports on loopback."""

    def __init__(self, manifests, ports, *, name):
        self.name = name
        self.ports = ports
        self.url = f"http://{HOST}:{ports['http']}"
        self.health = f"http://{HOST}:{ports['health']}"
        template = copy.deepcopy(only(manifests, "Deployment")["spec"]["template"])
        self._spec = template["spec"]
        self._natives = [
            each["name"]
            for each in self._spec["initContainers"]
            if each.get("restartPolicy") == "Always"
        ]
        everything = (*self._spec["initContainers"], *self._spec["containers"])
        self._containers = {each["name"]: each for each in everything}
        for container in everything:
            for port in container.get("ports", []):
                port |= {"hostIP": HOST, "hostPort": ports[port["name"]]}
        create(self._spec, manifests, name=name, labels=template["metadata"]["labels"])

    def start(self):
        start(self._spec, name=self.name, is_started=lambda each: self.probe(each, "startupProbe"))
        deadline = time.monotonic() + START_S
        while not self.is_ready:
            assert time.monotonic() < deadline, podman("pod", "logs", self.name, check=False)
            time.sleep(0.2)

    @property
    def address(self):
        """On the network of the pods."""
        infra = podman("pod", "inspect", "-f", "{{.InfraContainerID}}", self.name)
        networks = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return podman("inspect", "-f", networks, infra)

    @property
    def is_ready(self):
        # The demo's models have no probe: in a cluster nobody waits for them.
        return (
            self.probe("pointsman", "startupProbe")
            and self.probe("envoy", "readinessProbe")
            and "ready" in podman("logs", f"{self.name}-demo-upstreams")
        )

    def remove(self):
        remove(self.name)

    def inspect(self, container, what):
        return podman("inspect", "-f", f"{{{{.State.{what}}}}}", f"{self.name}-{container}")

    def pid(self, container):
        return int(self.inspect(container, "Pid"))

    def exit_code(self, container):
        return int(self.inspect(container, "ExitCode"))

    def hook(self, container):
        """The container's preStop hook, as arguments of podman."""
        command = self._containers[container]["lifecycle"]["preStop"]["exec"]["command"]
        return ["exec", f"{self.name}-{container}", *command]

    def execute(self, container, *command):
        return subprocess.run(
            ["podman", "exec", f"{self.name}-{container}", *command],
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRON,
        )

    async def end(self):
        """As a kubelet ends a pod: every hook at once; SIGTERM to each container behind its own
        hook, and to native sidecars behind the rest, the last one first; SIGKILL to what is still
        there when the grace period is over."""
        grace_s = self._spec["terminationGracePeriodSeconds"]
        began = time.monotonic()
        gone = {name: asyncio.Event() for name in self._containers}

        async def end_one(name):
            if "lifecycle" in self._containers[name]:
                await asyncio.wait_for(podman_async(*self.hook(name)), grace_s)
            if name in self._natives:
                behind = self._natives[self._natives.index(name) + 1 :]
                for each in (*behind, *(each["name"] for each in self._spec["containers"])):
                    await gone[each].wait()
            left_s = max(2, int(grace_s - (time.monotonic() - began)))
            await podman_async("stop", "--time", str(left_s), f"{self.name}-{name}")
            gone[name].set()

        await asyncio.gather(*(end_one(each) for each in self._containers))

    def fault(self, port, body):
        """Set or clear a fault of a scripted model, which only the pod itself can reach."""
        method = "DELETE" if body is None else "POST"
        script = (
            "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method=sys.argv[2], "
            "data=sys.argv[3].encode() or None, headers={'content-type': 'application/json'}))"
        )
        url = f"http://{HOST}:{port}/demo/fault"
        done = self.execute("demo-upstreams", "python3", "-c", script, url, method, body or "")
        assert done.returncode == 0, done.stderr

    def probe(self, container, name):
        probe = self._containers[container][name]
        base = self.url if probe["httpGet"]["port"] == "http" else self.health
        try:
            with urllib.request.urlopen(base + probe["httpGet"]["path"], timeout=3) as response:
                return response.status == 200
        except OSError:
            return False


class Service:
    """A port that hands each connection to one of its pods in turn, as kube-proxy does: what is
    connected stays with its pod, whatever becomes of the list.

    Mutable: `ports` of the pods, and `_turn`.
    """

    def __init__(self, *ports):
        self.ports = list(ports)
        self._turn = 0

    async def start(self):
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self):
        self._server.close()

    async def _serve(self, reader, writer):
        self._turn += 1
        port = self.ports[self._turn % len(self.ports)]
        with contextlib.closing(writer), contextlib.suppress(OSError):
            theirs, back = await asyncio.open_connection(HOST, port)
            with contextlib.closing(back):
                pumps = [
                    asyncio.create_task(self._pump(*each))
                    for each in ((reader, back), (theirs, writer))
                ]
                await asyncio.wait(pumps, return_when=asyncio.ALL_COMPLETED)

    @staticmethod
    async def _pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
