"""A whole gateway for a test: real Envoy, real sidecar process, scripted upstreams; loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
from ports import HOST, free_ports
from prometheus_client.parser import text_string_to_metric_families

from extproc.app.audit import as_text, compare
from extproc.app.envoy_files import install
from extproc.config import load
from extproc.demo.faults import parse_fault
from extproc.demo.upstream import ScriptedUpstream
from extproc.supervise import find_envoy

CHAT = "/v1/chat/completions"
START_S = 60.0
AUDIT_S = 12.0

ROUTES = """
[router]
default = "chat"
deadline = "5s"

[[route]]
name = "chat"
upstreams = ["primary", "fallback"]

[[route]]
name = "code"
upstreams = ["fallback", "primary"]
keywords = ["traceback", "编译错误"]
"""


def scenario(function):
    """Run a coroutine test, bounded in time."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(function(*args, **kwargs), 110))

    return run


def ask(text="hello there", model="auto", **more):
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


async def until(condition: Callable[[], object], *, within_s: float = 5.0, every_s: float = 0.02):
    """Wait until `condition` (plain or coroutine function) is true, and answer its value."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(every_s)


class Gateway:
    """Handles to the parts of a running gateway; processes are restarted through it."""

    def __init__(self, directory: Path, upstreams: dict[str, ScriptedUpstream]) -> None:
        self.directory = directory
        self.upstreams = upstreams
        self.config_path = directory / "pointsman.toml"
        self.socket_path = str(directory / "x.sock")
        self.listen, self.admin, self.metrics_port = free_ports(3)
        self.client = httpx.AsyncClient(base_url=f"http://{HOST}:{self.listen}", timeout=30)
        self.base_paths: dict[str, str] = {}
        self.base_urls: dict[str, str] = {}
        self.extra_environ: dict[str, str] = {}
        self.within: tuple[str, ...] = ()
        self.sidecar: subprocess.Popen | None = None
        self.envoy: subprocess.Popen | None = None

    def write_config(
        self, body: str, upstream_keys: dict[str, str], *, tables: str, metrics_keys: str = ""
    ) -> None:
        parts = [
            f'[server]\nlisten = "{HOST}:{self.listen}"\n{tables}',
            f'[admin]\nlisten = "{HOST}:{self.admin}"\n',
            f'[metrics]\nlisten = "{HOST}:{self.metrics_port}"\n{metrics_keys}',
            f'[extproc]\nsocket = "{self.socket_path}"\n',
        ]
        for each, upstream in self.upstreams.items():
            base_url = self.base_urls.get(each, upstream.base_url) + self.base_paths.get(each, "")
            parts.append(
                f'[upstream.{each}]\nname = "vllm-{each}"\nmodel = "model-of-{each}"\n'
                f'base_url = "{base_url}"\n{upstream_keys.get(each, "")}\n'
            )
        if "[router]" not in body:
            # A loaded machine must not turn a slow reply of the sidecar into another outcome.
            parts.append('[router]\ndeadline = "5s"\n')
        self.config_path.write_text("\n".join(parts) + body, encoding="utf-8")

    def environ(self) -> dict[str, str]:
        keys = {"PRIMARY_KEY": "sk-primary", "FALLBACK_KEY": "sk-fallback"}
        return {**os.environ, **keys, **self.extra_environ}

    async def start_sidecar(self) -> None:
        log = (self.directory / "sidecar.log").open("ab")
        command = [sys.executable, "-m", "extproc.cli", "serve", "--config", str(self.config_path)]
        self.sidecar = subprocess.Popen(command, stderr=log, env=self.environ())
        log.close()
        await until(self._sidecar_ready, within_s=START_S)

    async def _sidecar_ready(self) -> bool:
        assert self.sidecar is not None
        assert self.sidecar.poll() is None, (self.directory / "sidecar.log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            return (await self.client.get(self.metrics_url("/readyz"))).status_code == 200
        return False

    async def start_envoy(self) -> None:
        bootstrap = install(load(self.config_path, environ=None))
        log = (self.directory / "envoy.log").open("ab")
        command = [*self.within, str(find_envoy()), "-c", str(bootstrap), "--log-level", "warning"]
        command += ["--file-flush-interval-msec", "100"]
        self.envoy = subprocess.Popen(
            [*command, "--use-dynamic-base-id"], stderr=log, env=self.environ()
        )
        log.close()
        await until(self._envoy_ready, within_s=START_S)

    async def _envoy_ready(self) -> bool:
        assert self.envoy is not None
        assert self.envoy.poll() is None, (self.directory / "envoy.log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            return (await self.client.get(f"http://{HOST}:{self.admin}/ready")).status_code == 200
        return False

    async def restart(self) -> None:
        """Both processes, on the config file as it is now."""
        for process in (self.envoy, self.sidecar):
            assert process is not None
            process.terminate()
            process.wait()
        await self.start_sidecar()
        await self.start_envoy()

    def kill_sidecar(self) -> None:
        assert self.sidecar is not None
        self.sidecar.send_signal(signal.SIGKILL)
        self.sidecar.wait()

    def metrics_url(self, path: str) -> str:
        return f"http://{HOST}:{self.metrics_port}{path}"

    async def chat(self, body=None, *, path=CHAT, **kwargs) -> httpx.Response:
        return await self.client.post(path, json=ask() if body is None else body, **kwargs)

    async def fault(self, upstream: str, kind: str | None, **more) -> None:
        fault = None if kind is None else parse_fault({"kind": kind, **more})
        await self.upstreams[upstream].set_fault(fault)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` whose labels include `labels`."""
        text = (await self.client.get(self.metrics_url("/metrics"))).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def settled(self, name: str, value: float, **labels: str) -> None:
        """Wait until the records are in and `name` is `value`."""
        seen = None
        for _ in range(200):
            seen = await self.metric(name, **labels)
            if seen == value:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{name}{labels} is {seen}, not {value}")

    async def envoy_stat(self, name: str) -> int:
        text = (await self.client.get(f"http://{HOST}:{self.admin}/stats?filter=^{name}$")).text
        return int(text.rpartition(":")[2])

    async def adds_up(self) -> None:
        """Whatever a test did to it: what Envoy ended and what we account for differ by nothing.

        A killed sidecar is started again first, since it is the next one that has to account for it.
        """
        if self.sidecar is None or self.envoy is None or self.envoy.poll() is not None:
            return
        if self.sidecar.poll() is not None:
            await self.start_sidecar()
        found = await compare(
            f"http://{HOST}:{self.admin}", f"http://{HOST}:{self.metrics_port}", wait_s=AUDIT_S
        )
        assert found.adds_up, as_text(found)

    async def aclose(self) -> None:
        await self.client.aclose()
        for process in (self.envoy, self.sidecar):
            if process is not None and process.poll() is None:
                process.terminate()
        for process in (self.envoy, self.sidecar):
            if process is not None:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for upstream in self.upstreams.values():
            await upstream.aclose()


@contextlib.asynccontextmanager
async def gateway(
    config: str = ROUTES,
    *,
    upstream_keys: dict[str, str] | None = None,
    server_keys: str = "",
    metrics_keys: str = "",
    names: tuple[str, ...] = ("primary", "fallback"),
    base_paths: dict[str, str] | None = None,
    base_urls: dict[str, str] | None = None,
    sidecar: bool = True,
    within: tuple[str, ...] = (),
) -> AsyncIterator[Gateway]:
    """A gateway over one scripted upstream a name; `upstream_keys`: more TOML for its table.

    `base_urls`: what stands in front of a scripted upstream. `within`: a command that becomes Envoy.
    """
    keys = dict.fromkeys(names, 'inference_timeout = "800ms"\nconnect_timeout = "500ms"\n')
    for name, more in (upstream_keys or {}).items():
        keys[name] = more if "inference_timeout" in more else keys[name] + more
    directory = Path(tempfile.mkdtemp(prefix="gw-"))
    upstreams = {name: ScriptedUpstream(name, chunk_gap_s=0.0) for name in names}
    for upstream in upstreams.values():
        await upstream.start()
    running = Gateway(directory, upstreams)
    running.base_paths = base_paths or {}
    running.base_urls = base_urls or {}
    running.within = within
    running.write_config(config, keys, tables=server_keys, metrics_keys=metrics_keys)
    try:
        if sidecar:
            await running.start_sidecar()
        await running.start_envoy()
        yield running
        await running.adds_up()
    except BaseException:
        for log in sorted(directory.glob("*.log")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-4000:]}\n")
        raise
    finally:
        await running.aclose()
        shutil.rmtree(directory, ignore_errors=True)
