"""A rolling update under load, with two pods of the chart: nothing is lost, and streams finish.

podman runs the pods; a Service, the taking out of the endpoints, hooks and signals are pods.py's,
in a kubelet's order. Clients of the kinds that lose requests elsewhere are on at once: one with a
pool, one that connects anew each time, and many whose kept connection is silent for longer than the
drain's settling, so that nothing has told them to leave.
"""

import asyncio
import time

import httpx
import pytest
from chart_tools import only
from gateway import CHAT, ask, free_ports, scenario, until
from pods import Pod, Service, image_values, need_podman

from extproc.demo.answers import PIECES

SETTLE_S, LIMIT_S = 3, 30
ENDPOINTS_LAG_S = 1.0
"""From a pod's end until the last node knows of it; with 1,000 nodes it takes seconds too."""
SPARSE = 100
SPARSE_EVERY_S = SETTLE_S + 1
STREAM_S = 16
CODE = "Write a Python function that reverses a linked list"


class Load:
    """Mutable: `answered`, by kind, and `lost`."""

    def __init__(self, url):
        self._url = url
        self.over = asyncio.Event()
        self.answered = {"pooled": 0, "fresh": 0, "sparse": 0}
        self.lost = []
        self.undecided = 0

    async def _one(self, kind, client):
        try:
            answer = await client.post(CHAT, json=ask(CODE))
        except httpx.HTTPError as error:
            self.lost.append((kind, time.monotonic(), repr(error)))
            return
        if answer.status_code != 200 or answer.headers["x-pointsman-upstream"] == "rule":
            self.lost.append((kind, time.monotonic(), answer.status_code))
        self.undecided += answer.headers["x-pointsman-reason"] == "degraded_bypassed"
        self.answered[kind] += 1

    async def pooled(self):
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=20) as client,
            asyncio.TaskGroup() as group,
        ):
            while not self.over.is_set():
                group.create_task(self._one("pooled", client))
                await asyncio.sleep(0.05)

    async def fresh(self):
        while not self.over.is_set():
            async with httpx.AsyncClient(base_url=self._url, timeout=20) as client:
                await self._one("fresh", client)
            await asyncio.sleep(0.1)

    async def sparse(self, number):
        """Every SPARSE_EVERY_S, on one connection that it never closes by itself."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        await asyncio.sleep(SPARSE_EVERY_S * number / SPARSE)
        async with httpx.AsyncClient(base_url=self._url, timeout=20, limits=limits) as client:
            while not self.over.is_set():
                await self._one("sparse", client)
                await asyncio.sleep(SPARSE_EVERY_S)


async def stream(url, number):
    """The whole text of an event stream."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", CHAT, json=ask(f"{CODE} {number}", stream=True)) as response,
    ):
        assert response.headers["x-pointsman-reason"] != "degraded_bypassed"
        return (await response.aread()).decode()


@pytest.fixture
def start(helm4):
    """Starts a pod by its name, and waits until it is ready."""
    need_podman()
    started = []

    def run(name, *arguments, **values):
        drain = {"drain": {"settleSeconds": SETTLE_S, "limitSeconds": LIMIT_S}}
        manifests = helm4.manifests(*arguments, values=image_values() | drain | values)
        containers = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
        (demo,) = (each for each in containers if each["name"] == "demo-upstreams")
        demo["args"].append(f"--chunk-gap={STREAM_S / PIECES}")
        ports = dict(zip(("http", "health"), free_ports(2), strict=True))
        started.append(Pod(manifests, ports, name=name))
        started[-1].start()
        return started[-1]

    yield run
    for each in started:
        each.remove()


@pytest.mark.timeout(240)
def test_a_rolling_update_under_load_loses_nothing(start):
    asyncio.run(asyncio.wait_for(_updates(start), 220))


async def _updates(start):
    """One update with nothing else in flight, which ends soon, and one with streams."""
    pods = [await asyncio.to_thread(start, "gw-rolling-0")]
    service = Service(pods[0].ports["http"])
    load = Load(await service.start())
    texts, took_s = [], []
    async with asyncio.TaskGroup() as group:
        for each in (load.pooled(), load.fresh(), *map(load.sparse, range(SPARSE))):
            group.create_task(each)
        for update, streams in enumerate((0, 5), start=1):
            # maxSurge 1, maxUnavailable 0: the new pod is ready before the old one has to go.
            pods.append(await asyncio.to_thread(start, f"gw-rolling-{update}"))
            old, new = pods[-2:]
            answered = load.answered["sparse"]
            await until(lambda: load.answered["sparse"] >= answered + SPARSE, within_s=20)  # noqa: B023
            service.ports.append(new.ports["http"])
            streaming = [asyncio.create_task(stream(old.url, each)) for each in range(streams)]
            await asyncio.sleep(0.5)
            began_s = time.monotonic()
            ending = asyncio.create_task(old.end())
            await asyncio.sleep(ENDPOINTS_LAG_S)
            service.ports.remove(old.ports["http"])
            await ending
            took_s.append(time.monotonic() - began_s)
            texts += await asyncio.gather(*streaming)
        # Whoever is still connected to a pod that is gone would notice now.
        await asyncio.sleep(SPARSE_EVERY_S + 1)
        load.over.set()
    await service.close()
    assert load.lost == [], load.answered
    assert load.undecided == 0
    assert len(texts) == 5
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    # Streams are waited for, and the pod goes as soon as there are none: far from the limit.
    assert took_s[0] < STREAM_S - 1 < took_s[1] < LIMIT_S, took_s
    for each in pods[:-1]:
        codes = {name: each.exit_code(name) for name in ("envoy", "pointsman")}
        assert codes == {"envoy": 0, "pointsman": 0}


@scenario
async def test_a_native_sidecar_is_warm_before_envoy_starts_and_ends_after_it(start):
    """podman has none: the order is a kubelet's, kept by pods.py."""
    pod = await asyncio.to_thread(start, "gw-native", "--kube-version=1.29", nativeSidecar=True)
    load = Load(pod.url)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.pooled())
        await until(lambda: load.answered["pooled"] >= 20, within_s=20)
        streaming = asyncio.create_task(stream(pod.url, 0))
        await asyncio.sleep(0.5)
        ending = asyncio.create_task(pod.end())
        await asyncio.sleep(SETTLE_S / 2)
        # One pod alone: whoever comes when it has closed is refused, so nobody does.
        load.over.set()
        text = await streaming
        await ending
    assert load.lost == []
    assert load.undecided == 0
    assert text.endswith("data: [DONE]\n\n")
    ended = {name: pod.inspect(name, "FinishedAt") for name in ("envoy", "pointsman")}
    assert ended["envoy"] < ended["pointsman"]
    assert pod.exit_code("envoy") == pod.exit_code("pointsman") == 0
