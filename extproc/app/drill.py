"""`pointsman drill`: wires drills to a gateway of their own, or to a running one with demo upstreams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Final

import aiohttp

from extproc.config import Address, Config, Unfit, env_secret, load, parse
from extproc.demo import DEMO_CONFIG, demo_argv
from extproc.drill.events import Event
from extproc.drill.expectations import expectations
from extproc.drill.plan import DEFAULT_RPS, DrillFault, PlanError, Setting, plan
from extproc.drill.report import Report, heading, row_line, table
from extproc.drill.run import Drill
from extproc.drill.story import Story
from extproc.drill.target import (
    Access,
    DrillError,
    Ends,
    Target,
    find_switch,
    is_loopback,
    let_in,
    new_session,
)
from extproc.drill.timeline import Row, Timeline
from extproc.supervise import US, Child, OnExit, Supervisor, find_envoy, http_ready

_HOST: Final = "127.0.0.1"
_OWN_UPSTREAM: Final = "primary"
_TAIL_LINES: Final = 10
_LINE_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    faults: tuple[DrillFault, ...]
    rps: float = DEFAULT_RPS
    article: bool = False
    """Own gateway: the article's values instead of short ones."""
    url: str | None = None
    """A running gateway; None: one of our own."""
    upstream: str | None = None
    config: Path | None = None
    """Of the running gateway; None: the demo's."""
    api_key_env: str | None = None
    """Of the running gateway: the variable that holds a client's key."""
    ca_file: Path | None = None
    """Of the running gateway: who signed its certificate; None: one of the system's CAs."""


@dataclass(frozen=True, slots=True)
class _Values:
    """The part of our own gateway's config that decides how long a drill takes."""

    cooldown: str
    primary_timeout: str
    fallback_timeout: str


_SHORT: Final = _Values(cooldown="3s", primary_timeout="500ms", fallback_timeout="800ms")
_ARTICLE: Final = _Values(cooldown="30s", primary_timeout="5s", fallback_timeout="8s")


def drill(options: Options, *, show: Callable[[str], None]) -> list[Report]:
    """Make every fault in turn; `show` gets the lines for a person, as they come.

    Raise PlanError, ConfigError, EnvoyNotFoundError, DrillError, KeyboardInterrupt.
    """
    if options.url is None:
        return _on_own_gateway(options, show)
    if options.article:
        raise PlanError("--article sets the values of a gateway of its own; leave --url out")
    if options.upstream is None:
        raise PlanError("say which upstream to break: --upstream ID")
    if not is_loopback(options.url):
        raise PlanError(f"{options.url} is not on this machine: drill a gateway where it runs")
    config = load(options.config or DEMO_CONFIG, environ=None)
    settings = _settings(options, config, options.upstream)
    access = Access(key=_key(options.api_key_env), tls=_trust(options.ca_file))
    return asyncio.run(_on_running(settings, config, options.url.rstrip("/"), show, access))


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    try:
        key = env_secret(variable, os.environ)
    except Unfit as unfit:
        raise PlanError(f"{unfit.problem}; {unfit.mend}") from None
    if key is None:
        raise PlanError(f"the environment variable {variable} is not set")
    return key


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    """Any name will do: who is asked is loopback."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # SSLError is one
        raise PlanError(f"{ca_file}: {error.strerror or 'holds no certificate in PEM'}") from error
    context.check_hostname = False
    return context


def _settings(options: Options, config: Config, upstream: str) -> list[Setting]:
    return [plan(config, upstream, fault, rps=options.rps) for fault in options.faults]


async def _on_running(
    settings: Sequence[Setting],
    config: Config,
    url: str,
    show: Callable[[str], None],
    access: Access,
) -> list[Report]:
    # As on Ctrl-C: cancelled, mended, then gone.
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: signal.raise_signal(signal.SIGINT)
    )
    return await _all(settings, config, url, show, access)


def _on_own_gateway(options: Options, show: Callable[[str], None]) -> list[Report]:
    if any((options.upstream, options.config, options.api_key_env, options.ca_file)):
        raise PlanError(
            "--upstream, --config, --api-key-env and --ca-file go with --url, the gateway to drill"
        )
    find_envoy()  # rather here than in a child
    text = _own_config(options)
    config = parse(text, file="drill.toml", environ=None)
    settings = _settings(options, config, _OWN_UPSTREAM)
    with tempfile.TemporaryDirectory(prefix="pointsman-drill-") as directory:
        path = Path(directory) / "drill.toml"
        path.write_text(text, encoding="utf-8")
        show("starting a gateway and two scripted upstreams on this machine ...")
        reports = asyncio.run(
            _beside(
                _children(path, config),
                lambda: _all(settings, config, config.server.url, show, Access()),
            )
        )
    if reports is None:
        raise KeyboardInterrupt
    return reports


async def _beside(
    children: Sequence[Child], work: Callable[[], Awaitable[list[Report]]]
) -> list[Report] | None:
    """Do `work` once the children are ready, and end them behind it; None: a signal came first."""
    ready, stopping = asyncio.Event(), asyncio.Event()

    async def is_ready() -> None:
        ready.set()

    async def when_ready() -> list[Report]:
        await ready.wait()
        return await work()

    async def end_work() -> None:
        """While the children still run, so that the upstream can be mended."""
        stopping.set()
        working.cancel()
        await asyncio.wait({working})

    output = StringIO()
    supervisor = Supervisor(children, on_ready=is_ready, before_stop=end_work, out=output)
    working = asyncio.create_task(when_ready())
    running = asyncio.create_task(supervisor.run())
    try:
        await asyncio.wait({running, working}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        await asyncio.wait({working})
        if not (running.done() or stopping.is_set()):
            supervisor.stop("the drill is over")
        code = await running
    if code:
        raise DrillError(f"the drill's own gateway came to an end: {_epitaph(output.getvalue())}")
    return None if working.cancelled() else working.result()


def _epitaph(output: str) -> str:
    """Why a supervisor's run ended, and the last that was said."""
    lines = [line[:_LINE_CHARACTERS] for line in output.splitlines()]
    last_own = max((at for at, line in enumerate(lines) if line.startswith(US)), default=0)
    why = lines[last_own].removeprefix(US).strip(" |") if lines else ""
    return "\n  ".join([why, *lines[last_own + 1 :][-_TAIL_LINES:]])


async def _all(
    settings: Sequence[Setting],
    config: Config,
    url: str,
    show: Callable[[str], None],
    access: Access,
) -> list[Report]:
    reports = []
    async with new_session() as session:
        for setting in settings:
            bases = {each: config.upstreams[each].url for each in setting.models}
            ends = Ends(
                gateway=url,
                access=access,
                metrics=config.metrics.url,
                admin=config.admin.url,
                switch=await find_switch(
                    session,
                    {each: f"{base.scheme}://{base.netloc}" for each, base in bases.items()},
                    setting.upstream,
                ),
            )
            await let_in(session, url, access)
            for line in heading(setting, url):
                show(line)
            metric = config.fallback.metric_prefix
            report = await _one(session, ends, setting, fallback_metric=metric, show=show)
            for line in (*table(report.expectations), ""):
                show(line)
            reports.append(report)
    return reports


async def _one(
    session: aiohttp.ClientSession,
    ends: Ends,
    setting: Setting,
    *,
    fallback_metric: str,
    show: Callable[[str], None],
) -> Report:
    timeline, rows = Timeline(setting), list[Row]()
    loop = asyncio.get_running_loop()
    origin_s = loop.time()

    def clock() -> float:
        return loop.time() - origin_s

    def told(more: Sequence[Row]) -> None:
        rows.extend(more)
        for row in more:
            show(row_line(row))

    def tell(event: Event) -> None:
        told(timeline.feed(event))

    target = Target(
        session,
        ends,
        setting,
        fallback_metric=fallback_metric,
        run=f"drill-{secrets.token_hex(4)}",
        clock=clock,
    )
    run = Drill(setting, target, clock=clock, tell=tell)
    await run.run()
    told(timeline.close(clock()))
    return Report(setting, tuple(rows), tuple(expectations(Story.of(setting, run.events))))


def _own_config(options: Options) -> str:
    """Two upstreams, one behind the other, on free ports of this machine."""
    values = _ARTICLE if options.article else _SHORT
    counted = ["timeout", "5xx", "connect_error"]
    if DrillFault.BAD_SCHEMA in options.faults:
        counted.append("bad_schema")
    first_token = ""
    if DrillFault.SLOW_FIRST_TOKEN in options.faults:
        first_token = f'first_token_timeout = "{values.primary_timeout}"'
    listen, admin, metrics, primary, fallback = _free_ports(5)
    return f"""\
[server]
listen = "{_HOST}:{listen}"
[admin]
listen = "{_HOST}:{admin}"
[metrics]
listen = "{_HOST}:{metrics}"

[upstream.{_OWN_UPSTREAM}]
name = "vllm-primary"
base_url = "http://{_HOST}:{primary}"
model = "primary-model"
inference_timeout = "{values.primary_timeout}"
{first_token}

[upstream.fallback]
name = "vllm-fallback"
base_url = "http://{_HOST}:{fallback}"
model = "fallback-model"
inference_timeout = "{values.fallback_timeout}"

[circuit_breaker]
failure_threshold = 5
window = "30s"
cooldown = "{values.cooldown}"
half_open_max_requests = 3
counted_errors = {counted}

[retry]
# One try a request: `flaky` counts on the order in which its failures arrive.
max_retries = 0
"""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _children(path: Path, config: Config) -> list[Child]:
    """The scripted upstreams, and the gateway as a user starts it."""
    first = next(iter(config.upstreams.values()))
    return [
        Child(
            name="upstreams",
            argv=demo_argv(config.upstreams.values()),
            ready=http_ready(Address(first.host, first.port), "/health"),
            on_exit=OnExit.END,
        ),
        Child(
            name="gateway",
            argv=(sys.executable, "-m", "extproc.cli", "up", "--config", str(path)),
            ready=http_ready(config.server.listen, "/v1/models"),
            ready_within_s=120.0,
            on_exit=OnExit.END,
            stop_grace_s=30.0,
        ),
    ]
