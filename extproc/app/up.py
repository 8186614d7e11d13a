"""`pointsman up`: Envoy and the sidecar (and the demo's upstreams) in the foreground, supervised."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import aiohttp

from extproc.app.envoy_files import install
from extproc.config import SERVE_ONLY, Address, Config, Fault, Files, Unfit, client_keys, load
from extproc.demo import demo_argv
from extproc.embedding.model import default_cache_dir, ensure_model
from extproc.supervise import (
    Child,
    OnExit,
    Probe,
    Supervisor,
    busy_listener,
    find_envoy,
    http_ready,
)

DRAIN_S: Final = 5.0
"""Envoy refuses new connections and lets requests in flight finish for at most this long."""
_DRAIN_POLL_S: Final = 0.1


class StartError(Exception):
    """Why nothing was started, in one line for the person at the terminal."""


def up(path: Path, *, demo: bool, say: Callable[[str], None]) -> int:
    """Run until a signal; the exit code. `say` prints a line for a person; stdout gets `ready`.

    Raise ConfigError, StartError, or ModelError.
    """

    def warn(fault: Fault) -> None:
        say(f"warning: {fault}")

    config = load(path, environ=os.environ, files=Files(now_s=time.time(), warn=warn))
    if config.foreign is not None:
        raise StartError(f"{path}: {SERVE_ONLY}")
    busy = busy_listener(_listeners(config, demo=demo))
    if busy is not None:
        raise StartError(busy)
    envoy = find_envoy()
    if config.router.encoder.url is None and any(route.utterances for route in config.routes):
        # Here, with its progress in the terminal, rather than in a child that looks hung.
        ensure_model(
            config.router.encoder.path, cache_dir=default_cache_dir(os.environ), progress=say
        )
    with _run_dir() as run_dir:
        config = dataclasses.replace(config, extproc_socket=str(run_dir / "extproc.sock"))
        bootstrap = install(config)
        # A sidecar that is started again must read what Envoy was started with, not what has become of
        # the file: no name in it has to mean the same any more.
        kept = Path(shutil.copy(path, run_dir / "pointsman.toml"))
        children = [
            _sidecar(kept, config),
            _envoy(envoy, bootstrap, config),
        ]
        if demo:
            children.insert(0, _demo_upstreams(config))
        supervisor = Supervisor(
            children,
            on_ready=lambda: _announce(config, demo=demo),
            before_stop=lambda: _drain(config),
            before_stop_s=DRAIN_S + 1,
        )
        return asyncio.run(supervisor.run())


@contextlib.contextmanager
def _run_dir() -> Iterator[Path]:
    """A folder for what children read when they start again, which may be after months.

    systemd-tmpfiles removes what is older than some days, on many machines, but nothing in a folder
    that somebody holds a lock on (tmpfiles.d(5)).
    """
    with tempfile.TemporaryDirectory(prefix="pointsman-") as directory:
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield Path(directory)
        finally:
            os.close(held)


def _listeners(config: Config, *, demo: bool) -> dict[str, Address]:
    listeners = {
        "[server] listen": config.server.listen,
        "[admin] listen": config.admin,
        "[metrics] listen": config.metrics,
    }
    if config.envoy_metrics is not None:
        listeners["[metrics] envoy_listen"] = config.envoy_metrics
    if config.health is not None:
        listeners["[health] listen"] = config.health
    if demo:
        for each in config.upstreams.values():
            listeners[f"[upstream.{each.id}] base_url"] = Address(each.host, each.port)
    return listeners


def _sidecar(path: Path, config: Config) -> Child:
    return Child(
        name="sidecar",
        argv=(
            *(sys.executable, "-m", "extproc.cli", "serve"),
            *("--config", str(path), "--socket", config.extproc_socket),
        ),
        ready=http_ready(config.metrics, "/readyz"),
        ready_within_s=120.0,  # a slow machine still warms the model
        answers=http_ready(config.metrics, "/healthz"),
        stop_grace_s=15.0,
    )


def _envoy(envoy: Path, bootstrap: Path, config: Config) -> Child:
    return Child(
        name="envoy",
        argv=(
            *(str(envoy), "--config-path", str(bootstrap)),
            *("--log-level", "warning", "--log-format", "%l %n: %v"),
            # At each start it says at length that sse_to_metadata is work in progress.
            *("--component-log-level", "misc:error"),
            *("--file-flush-interval-msec", "1000"),  # the access log; Envoy's own default is 10 s
            # Several gateways on one machine must not meet in Envoy's shared memory.
            "--use-dynamic-base-id",
        ),
        ready=_answers(config),
        stop_grace_s=5.0,
    )


def _answers(config: Config) -> Probe:
    """The whole path: Envoy asks the sidecar, and the sidecar answers.

    Where the gateway would not let us in, Envoy alone, by its admin interface.
    """
    server = config.server
    envoy_alone = http_ready(config.admin, "/ready")
    if server.tls is not None and server.tls.client_ca_file is not None:
        return envoy_alone  # no certificate of a client is at hand

    async def probe() -> bool:
        heads = {}
        if server.auth is not None:
            try:  # anew each time: Envoy may have to start again, with other keys
                heads["authorization"] = f"Bearer {client_keys(server.auth.keys_file)[0].key}"
            except (Unfit, OSError):
                return await envoy_alone()
        models = http_ready(server.listen, "/v1/models", headers=heads, tls=server.tls is not None)
        return await models()

    return probe


def _demo_upstreams(config: Config) -> Child:
    first = next(iter(config.upstreams.values()))
    return Child(
        name="upstreams",
        argv=demo_argv(config.upstreams.values()),
        ready=http_ready(Address(first.host, first.port), "/health"),
        on_exit=OnExit.RESTART,
    )


async def _drain(config: Config) -> None:
    """New connections are refused, answers in flight go on; return when none is left."""
    admin = config.admin.url
    try:
        async with aiohttp.ClientSession() as session:
            # The tiers go on serving what is in flight.
            await session.post(f"{admin}/drain_listeners?inboundonly")
            for _ in range(round(DRAIN_S / _DRAIN_POLL_S)):
                if not await _active_requests(session, admin):
                    return
                await asyncio.sleep(_DRAIN_POLL_S)
    except aiohttp.ClientError:
        return  # Envoy is gone already


async def _active_requests(session: aiohttp.ClientSession, admin: str) -> int:
    stat = "http.ingress.downstream_rq_active"
    async with session.get(f"{admin}/stats", params={"filter": f"^{stat}$"}) as response:
        text = await response.text()
    return int(text.rpartition(":")[2] or 0)


async def _announce(config: Config, *, demo: bool) -> None:
    url = config.server.url
    sys.stdout.write(f"ready {url}\nstatus {config.metrics.url}/\n")
    if demo:
        broken = next(iter(config.upstreams.values()))
        sys.stdout.write(_demo_lines(url, f"http://{Address(broken.host, broken.port)}", broken.id))
    sys.stdout.flush()


def _demo_lines(url: str, upstream_url: str, upstream: str) -> str:
    """Three lines worth pasting, and what each should show."""
    show = "-H 'content-type: application/json' -d"

    def ask(text: str) -> str:
        body = '{"model":"auto","messages":[{"role":"user","content":"' + text + '"}]}'
        return f"curl -si {url}/v1/chat/completions {show} '{body}'"

    code = ask("Write a Python function that reverses a linked list")
    break_it = f"curl -s {upstream_url}/demo/fault {show} " + """'{"kind":"5xx"}'"""
    return f"""
A code question. Look for x-pointsman-route: code, x-pointsman-upstream: {upstream}
  {code}

A Chinese question. The same route and upstream; x-pointsman-reason: semantic
  {ask("帮我写一个快速排序的函数")}

The first again with its primary broken: x-pointsman-fallback: 5xx, and another upstream answers
  {break_it} && {code}
  (mend it: curl -s -X DELETE {upstream_url}/demo/fault)

Ctrl-C ends everything.
"""
