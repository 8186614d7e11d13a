"""What the benches share: prompts, routes, processes with an end, a load, the state of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy comes in with the product's code

from loadgen import HOST, Job, Result

from extproc.embedding.distill import ensure_static
from extproc.embedding.model import default_cache_dir

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "tests" / "data" / "prompts"
OUT = HERE / "out"
ROUTES = ("banking", "travel", "work", "kitchen_and_dining", "auto_and_commute")
UTTERANCES = 20
START_S = 90.0


def unwind_on_sigterm() -> None:
    """A bench that is told to stop ends what it started, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


# --- prompts ------------------------------------------------------------------------------------------


def _texts(name: str) -> list[str]:
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def utterances() -> dict[str, list[str]]:
    """Five routes of twenty utterances."""
    found: dict[str, list[str]] = {route: [] for route in ROUTES}
    for line in (DATA / "clinc_domains_train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["route"] in found and len(found[row["route"]]) < UTTERANCES:
            found[row["route"]].append(row["text"])
    return found


def prompts(count: int, words: int, seed: str) -> list[str]:
    """Each of so many words, and no two alike: two stretches of real prompts. The seed decides all."""
    corpus = " ".join(
        _texts("kinds_en") + _texts("mtbench_en") + _texts("clinc_domains_test")
    ).split()
    draw = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        parts = [(words + 1) // 2, words // 2]
        starts = [draw.randrange(len(corpus) - size) for size in parts]
        stretches = [corpus[s : s + size] for s, size in zip(starts, parts, strict=True)]
        made[" ".join(word for stretch in stretches for word in stretch)] = None
    return list(made)


def route_body(prompt: str) -> str:
    return json.dumps({"prompt": prompt})


def chat_body(prompt: str) -> str:
    return json.dumps({"model": "auto", "messages": [{"role": "user", "content": prompt}]})


# --- processes ----------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


class Server:
    """A child that answers POST /route on `port`. Mutable: `_process`."""

    def __init__(
        self,
        argv: Sequence[str],
        port: int,
        log: Path,
        environ: Mapping[str, str],
        *,
        metrics_port: int = 0,
    ) -> None:
        """`metrics_port`: where /metrics is, for one of ours."""
        self.port, self.metrics_port = port, metrics_port
        self._argv, self._log, self._environ = argv, log, {**os.environ, **environ}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdout=subprocess.DEVNULL, stderr=log, env=self._environ
            )
        deadline = time.monotonic() + START_S
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self._argv} does not serve:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.2)

    def answers(self) -> bool:
        return load(Job(port=self.port, path="/route", bodies=[route_body("hello")])).lost == 0

    def stop(self, *, grace_s: float = 30.0) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def buckets(self, histogram: str) -> dict[float, float]:
        """Upper edge in seconds -> how many were at most that, from the sidecar's /metrics."""
        found: dict[float, float] = {}
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics_port}/metrics") as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f'{histogram}_bucket{{le="'):
                    edge, _, count = line.partition('le="')[2].partition('"} ')
                    found[float(edge)] = float(count)
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """What each part of it has computed so far; the wall clock knows the neighbours, too."""
        assert self._process is not None
        return cpu_seconds_of(self._process.pid)

    def restart_at_once(self) -> None:
        """Without waiting for work that nobody waits for any more; for a server without children."""
        self.stop(grace_s=0.0)
        self.start()


PARTS = {"extproc.embedding.worker": "worker", "extproc.cli\0serve": "sidecar", "envoy": "envoy"}
"""By what stands in the command line, first match."""


def cpu_seconds_of(root: int) -> dict[str, float]:
    found = dict.fromkeys(PARTS.values(), 0.0)
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for pid, own in seconds.items():
        above = pid
        while above not in (root, 0):
            above = parents.get(above, 0)
        if not above or pid == root:
            continue
        with contextlib.suppress(OSError, StopIteration):
            words = Path(f"/proc/{pid}/cmdline").read_text()
            found[next(part for mark, part in PARTS.items() if mark in words)] += own
    return found


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()


def load(job: Job) -> Result:
    """From a process of its own; bounded."""
    bound_s = 60.0 + job.seconds + job.timeout_s + (len(job.bodies) / job.rate if job.rate else 0.0)
    done = subprocess.run(
        [sys.executable, str(HERE / "loadgen.py")],
        input=json.dumps(asdict(job)).encode(),
        stdout=subprocess.PIPE,
        timeout=bound_s,
        check=True,
    )
    return Result(**json.loads(done.stdout))


def gateway_config(
    directory: Path,
    name: str,
    *,
    listen: int,
    metrics: int,
    upstream: int,
    router: str,
    routes: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """One upstream behind all routes; `router`: more keys of [router]; `routes`: name -> utterances.

    The first one is the default.
    """
    routes = routes or utterances()
    (admin,) = free_ports(1)
    lines = [
        f'[server]\nlisten = "{HOST}:{listen}"',
        f'[admin]\nlisten = "{HOST}:{admin}"',
        f'[metrics]\nlisten = "{HOST}:{metrics}"',
        f'[upstream.primary]\nbase_url = "http://{HOST}:{upstream}"\nmodel = "primary-model"',
        f'[router]\ndefault = "{next(iter(routes))}"\n{router}',
    ]
    for route, texts in routes.items():
        lines.append(f'[[route]]\nname = "{route}"\nupstreams = ["primary"]')
        if texts:
            lines.append(f"utterances = {json.dumps(texts)}")
    path = directory / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def gateway(
    directory: Path,
    name: str,
    *,
    upstream: int,
    router: str = "",
    routes: Mapping[str, Sequence[str]] | None = None,
) -> Server:
    """Ours, as a person starts it: real Envoy, real models, which are built first where they are not yet."""
    ensure_static(default_cache_dir(os.environ), progress=say)
    listen, metrics = free_ports(2)
    config = gateway_config(
        directory,
        name,
        listen=listen,
        metrics=metrics,
        upstream=upstream,
        router=router,
        routes=routes,
    )
    argv = [sys.executable, "-m", "extproc.cli", "up", "--config", str(config)]
    return Server(argv, listen, directory / f"{name}.log", {}, metrics_port=metrics)


@contextlib.contextmanager
def scripted_upstream(log: Path) -> Iterator[int]:
    """A model that answers every request; its port."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "extproc.demo", "--listen", f"{HOST}:{port}=primary"]
    with log.open("ab") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


# --- the record ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a figure is worth nothing without."""

    date: str
    cores: int
    load_average: tuple[float, float, float]


def machine() -> Machine:
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    cores = len(os.sched_getaffinity(0))
    return Machine(date, cores, tuple(round(each, 2) for each in os.getloadavg()))


def write(path: Path, document: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{path}: written", file=sys.stderr, flush=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
