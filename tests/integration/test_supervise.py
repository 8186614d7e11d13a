"""The supervisor with real children: order, restarts, giving up, signals, and what it leaves alone."""

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import uvloop
from ports import free_ports

from extproc.config.model import Address, Upstream
from extproc.demo import demo_argv
from extproc.supervise import (
    Child,
    OnExit,
    RestartPolicy,
    Supervisor,
    busy_listener,
    find_envoy,
    http_ready,
)

QUICK = RestartPolicy(base_s=0.01, max_s=0.05)
SLEEP = ("sleep", "600")
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def shell(script):
    return ("sh", "-c", script)


def python(script):
    return (sys.executable, "-c", script)


def says(out, text):
    """A probe: true once the output holds a text."""

    async def probe():
        return text in out.getvalue()

    return probe


class Run:
    """A supervisor at work in this process, with what it wrote."""

    def __init__(self, *children, out=None, policy=QUICK, **options):
        self.out = out or io.StringIO()
        self.supervisor = Supervisor(children, out=self.out, policy=policy, **options)
        self.task = asyncio.ensure_future(self.supervisor.run())

    async def until(self, condition):
        while not condition():
            if self.task.done():
                self.task.result()
                raise AssertionError(f"it ended early:\n{self.text}")
            await asyncio.sleep(0.005)

    async def pid(self, name, *, other_than=None):
        await self.until(lambda: self.supervisor.pids.get(name, other_than) != other_than)
        return self.supervisor.pids[name]

    @property
    def text(self):
        return self.out.getvalue()

    async def stop(self):
        self.supervisor.stop()
        return await self.task


def on_a_loop(function, *arguments, loop_factory=None):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(function(*arguments), 30))
    assert zombies() == []


def alive(pid):
    """Whether it runs; a zombie that its new parent has not reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def zombies():
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.append(stat.parent.name)
    return found


def wait_for(condition, within_s=10.0):
    until_s = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return result


# --- starting and keeping


def test_children_start_in_order_each_when_the_last_is_ready():
    async def scenario():
        out = io.StringIO()
        when_ready = []

        async def on_ready():
            when_ready.append(sorted(run.supervisor.pids))

        first = Child(
            name="first",
            argv=shell("echo begun; sleep 0.2; echo done; exec sleep 600"),
            ready=says(out, "done"),
        )
        run = Run(first, Child(name="second", argv=SLEEP), out=out, on_ready=on_ready)
        await run.pid("first")
        await run.until(lambda: "begun" in run.text)
        assert "second" not in run.supervisor.pids
        await run.pid("second")
        assert "done" in run.text
        await run.until(lambda: when_ready)
        assert when_ready == [["first", "second"]]
        assert await run.stop() == 0

    on_a_loop(scenario)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_killed_child_is_started_again_and_the_others_stay(loop_factory):
    async def scenario():
        run = Run(Child(name="a", argv=SLEEP), Child(name="b", argv=SLEEP))
        b = await run.pid("b")
        a = await run.pid("a")
        for _ in range(3):
            os.kill(a, signal.SIGKILL)
            a = await run.pid("a", other_than=a)
        assert run.supervisor.pids["b"] == b
        assert run.text.count("a was killed by SIGKILL; starting it again in") == 3
        assert zombies() == []
        assert await run.stop() == 0
        assert not alive(a)
        assert not alive(b)

    on_a_loop(scenario, loop_factory=loop_factory)


def test_restarts_wait_longer_each_time():
    async def scenario():
        out = io.StringIO()
        child = Child(name="a", argv=shell("echo up; sleep 0.1; exit 7"), ready=says(out, "up"))
        run = Run(child, out=out)
        await run.until(lambda: run.text.count("exited with 7") >= 4)
        waits = re.findall(r"again in ([\d.]+) s", run.text)[:4]
        assert waits == ["0.01", "0.02", "0.04", "0.05"]
        assert await run.stop() == 0

    on_a_loop(scenario)


def test_a_child_that_never_gets_ready_ends_everything_with_its_last_lines():
    async def scenario():
        async def never():
            raise ConnectionRefusedError

        run = Run(
            Child(name="good", argv=SLEEP),
            Child(name="bad", argv=shell("echo no config >&2; exit 3"), ready=never),
        )
        good = await run.pid("good")
        assert await run.task == 1
        assert run.text.count("bad       | no config") == 5
        epitaph = "bad exited with 3, 5 times without ever being ready; its last lines:"
        assert run.text.endswith(f"pointsman | {epitaph}\n    no config\n")
        assert not alive(good)

    on_a_loop(scenario)


def test_a_missing_program_is_named():
    async def scenario():
        run = Run(Child(name="envoy", argv=("/nowhere/envoy",)))
        assert await run.task == 1
        assert "cannot start /nowhere/envoy: No such file or directory" in run.text

    on_a_loop(scenario)


def test_a_child_that_lives_but_is_never_ready_is_killed_and_counted():
    async def scenario():
        async def never():
            return False

        child = Child(
            name="a", argv=python(STUBBORN), ready=never, ready_within_s=0.3, stop_grace_s=0.1
        )
        run = Run(child, policy=RestartPolicy(base_s=0.01, most_false_starts=2))
        assert await run.task == 1
        assert run.text.count("a was not ready within 0.3 s") == 2

    on_a_loop(scenario)


def test_a_child_that_hangs_is_killed_and_started_again():
    """A stopped process keeps its pid and its socket: only asking it shows."""

    async def scenario():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ready = http_ready(Address("127.0.0.1", port), "/")
        serve = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port))
        asking = {"answers": ready, "asked_every_s": 0.05, "most_silences": 2}
        run = Run(Child(name="a", argv=serve, ready=ready, **asking))
        await run.until(lambda: run.text.count('"GET / HTTP/1.1" 200') >= 5)
        hung = run.supervisor.pids["a"]
        os.kill(hung, signal.SIGSTOP)
        await run.pid("a", other_than=hung)
        assert not alive(hung)
        assert "a does not answer: killing it\n" in run.text
        served = run.text.count("200 -")
        await run.until(lambda: run.text.count("200 -") > served)
        await run.stop()

    on_a_loop(scenario)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 1)])
def test_an_essential_child_ends_everything_with_its_code(script, code):
    async def scenario():
        other = Child(name="other", argv=SLEEP)
        run = Run(other, Child(name="job", argv=shell(script), on_exit=OnExit.END))
        pid = await run.pid("other")
        assert await run.task == code
        assert not alive(pid)

    on_a_loop(scenario)


def test_a_probe_that_fails_by_a_bug_ends_everything_with_that_bug():
    async def scenario():
        async def broken():
            raise KeyError("bug")

        run = Run(Child(name="a", argv=SLEEP, ready=broken))
        pid = await run.pid("a")
        with pytest.raises(KeyError, match="bug"):
            await run.task
        assert not alive(pid)

    on_a_loop(scenario)


def test_a_run_that_is_cancelled_ends_its_children():
    async def scenario():
        run = Run(Child(name="a", argv=SLEEP))
        pid = await run.pid("a")
        run.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run.task
        assert not alive(pid)

    on_a_loop(scenario)


def test_http_probe():
    async def scenario():
        answers = [b"HTTP/1.1 503 Starting\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b""]

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.pop(0))
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
            probe = http_ready(address, "/ready")
            assert [await probe() for _ in range(3)] == [False, True, False]
        with pytest.raises(ConnectionRefusedError):
            await probe()

    on_a_loop(scenario)


@pytest.mark.envoy
def test_envoy_and_the_demo_upstreams_are_kept():
    async def scenario():
        admin_port, upstream_port = free_ports(2)
        admin = Address("127.0.0.1", admin_port)
        upstream = Upstream(
            id="coder", name="coder", base_url=f"http://127.0.0.1:{upstream_port}", model="m"
        )
        bootstrap = {
            "admin": {
                "address": {"socket_address": {"address": admin.host, "port_value": admin.port}}
            }
        }
        arguments = (
            "--disable-hot-restart",
            "--log-level",
            "warning",
            "--config-yaml",
            json.dumps(bootstrap),
        )
        served = http_ready(Address(upstream.host, upstream.port), "/health")
        answers = http_ready(admin, "/ready")
        run = Run(
            Child(name="demo", argv=demo_argv([upstream]), ready=served),
            Child(name="envoy", argv=(str(find_envoy()), *arguments), ready=answers),
        )
        for name, probe in (("demo", served), ("envoy", answers)):
            pid = await run.pid(name)
            assert await until_answered(probe)
            os.kill(pid, signal.SIGKILL)
            await run.pid(name, other_than=pid)
            assert await until_answered(probe)
        assert await run.stop() == 0
        assert "killed:" not in run.text

    on_a_loop(scenario)


async def until_answered(probe):
    while True:
        with contextlib.suppress(OSError):
            if await probe():
                return True
        await asyncio.sleep(0.01)


# --- output


def test_output_is_forwarded_line_by_line_with_the_name():
    async def scenario():
        script = (
            r"printf 'one\ntwo\r\n'; echo three >&2; printf 'caf\303\251 \377\nend'; exec sleep 600"
        )
        run = Run(Child(name="a", argv=shell(script)))
        await run.until(lambda: "caf" in run.text)
        assert await run.stop() == 0
        lines = [line for line in run.text.splitlines() if line.startswith("a ")]
        assert lines == [
            "a         | one",
            "a         | two",
            "a         | three",
            "a         | café \ufffd",
            "a         | end",
        ]

    on_a_loop(scenario)


def test_endless_lines_are_cut_and_a_flood_is_no_trouble():
    async def scenario():
        run = Run(
            Child(
                name="a",
                argv=shell(
                    "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end; exec sleep 600"
                ),
            )
        )
        await run.until(lambda: "| end" in run.text)
        assert await run.stop() == 0
        assert run.text.count("x") == 3_000_000
        assert max(map(len, run.text.splitlines())) < 200_000

    on_a_loop(scenario)


def test_a_terminal_that_has_gone_is_no_reason_to_end():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    async def scenario():
        run = Run(Child(name="a", argv=shell("echo hello; exec sleep 600")), out=Gone())
        await run.pid("a")
        assert await run.stop() == 0

    on_a_loop(scenario)


# --- stopping


def test_children_stop_in_reverse_order_after_the_drain():
    async def scenario():
        drained = []

        async def drain():
            drained.append(sorted(run.supervisor.pids))

        def child(name):
            script = f"trap 'echo {name} ends; exit 0' TERM; echo up; while :; do sleep 0.01; done"
            return Child(name=name, argv=shell(script))

        ready = asyncio.Event()

        async def on_ready():
            ready.set()

        run = Run(child("a"), child("b"), child("c"), before_stop=drain, on_ready=on_ready)
        await run.until(lambda: ready.is_set() and run.text.count("| up") == 3)
        assert await run.stop() == 0
        assert drained == [["a", "b", "c"]]
        assert re.findall(r"(\w) ends", run.text) == ["c", "b", "a"]

    on_a_loop(scenario)


@pytest.mark.parametrize("kind", ["fails", "never ends"])
def test_a_drain_that_does_not_work_out_holds_nothing_up(kind):
    async def scenario():
        async def drain():
            if kind == "fails":
                raise ConnectionRefusedError("admin is away")
            await asyncio.Event().wait()

        ready = asyncio.Event()

        async def on_ready():
            ready.set()

        child = Child(name="a", argv=SLEEP)
        run = Run(child, before_stop=drain, before_stop_s=0.2, on_ready=on_ready)
        await run.until(ready.is_set)
        pid = await run.pid("a")
        assert await run.stop() == 0
        assert not alive(pid)
        assert ("admin is away" if kind == "fails" else "did not wait for the drain") in run.text

    on_a_loop(scenario)


def test_a_deaf_child_is_killed_after_its_grace():
    async def scenario():
        run = Run(Child(name="a", argv=python(STUBBORN), stop_grace_s=0.2))
        pid = await run.pid("a")
        await run.until(lambda: "deaf" in run.text)
        assert await run.stop() == 0
        assert "a killed: not gone after 0.2 s" in run.text
        assert not alive(pid)

    on_a_loop(scenario)


def test_what_a_child_leaves_behind_in_its_group_goes_with_it():
    async def scenario():
        run = Run(Child(name="a", argv=shell("sleep 600 & echo stray $!; exit 1")))
        await run.until(lambda: run.text.count("stray") >= 2)
        strays = [int(pid) for pid in re.findall(r"stray (\d+)", run.text)]
        await run.until(lambda: not alive(strays[0]))
        assert await run.stop() in (0, 1)
        assert not any(map(alive, strays))

    on_a_loop(scenario)


def test_stopping_while_a_child_is_still_starting():
    async def scenario():
        async def never():
            await asyncio.Event().wait()
            return True

        run = Run(Child(name="a", argv=SLEEP, ready=never), Child(name="b", argv=SLEEP))
        pid = await run.pid("a")
        assert await run.stop() == 0
        assert not alive(pid)
        assert run.supervisor.pids == {}

    on_a_loop(scenario)


def test_stopping_while_a_child_waits_to_be_started_again():
    async def scenario():
        run = Run(
            Child(name="a", argv=shell("exit 1")), policy=RestartPolicy(base_s=600, max_s=600)
        )
        await run.until(lambda: "again in 600 s" in run.text)
        assert await run.stop() == 0

    on_a_loop(scenario)


# --- as a process of its own

PROGRAM = """
import asyncio, sys
from extproc.supervise import Child, Supervisor
children = [
    Child(name=str(number), argv=(sys.executable, "-c", script), stop_grace_s=60)
    for number, script in enumerate(sys.argv[1:])
]
sys.exit(asyncio.run(Supervisor(children).run()))
"""
POLITE = """
import os, signal, sys, time
def end(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""
DEAF = "import os; print('pid', os.getpid(), flush=True)\n" + STUBBORN


class Program:
    """A supervisor as a process, with its output so far."""

    def __init__(self, *scripts, **options):
        arguments = [sys.executable, "-u", "-c", PROGRAM, *scripts]
        options = {"stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        self.popen = subprocess.Popen(arguments, **options)
        self.source = self.popen.stderr.fileno() if self.popen.stderr else None
        self.text = ""

    def read_until(self, pattern, count=1):
        """Read on until a pattern was matched that often; the matches."""
        until_s = time.monotonic() + 20
        while len(found := re.findall(pattern, self.text)) < count:
            assert time.monotonic() < until_s, self.text
            data = os.read(self.source, 65_536)
            assert data, self.text
            self.text += data.decode()
        return found

    def pids(self, count):
        return [int(pid) for pid in self.read_until(r"pid (\d+)", count)]

    def wait(self):
        return self.popen.wait(20)


@contextlib.contextmanager
def program(*scripts, **options):
    running = Program(*scripts, **options)
    try:
        yield running
    finally:
        running.popen.kill()
        running.popen.wait()
        if running.popen.stderr:
            running.popen.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_in_order_with_exit_code_0(number):
    with program(POLITE, POLITE) as running:
        pids = running.pids(2)
        running.popen.send_signal(number)
        running.read_until("got SIGTERM", 2)
        assert running.wait() == 0
        assert f"stopping ({number.name})" in running.text
        assert not any(map(alive, pids))


def test_ctrl_c_in_a_terminal_reaches_only_the_supervisor():
    ours, theirs = pty.openpty()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        running = stack.enter_context(
            program(
                POLITE,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        )
        os.close(theirs)
        running.source = ours
        (pid,) = running.pids(1)
        os.write(ours, b"\x03")
        running.read_until("got SIGTERM")
        assert running.wait() == 0
        assert "SIGINT)" in running.text
        assert not alive(pid)


def test_a_second_ctrl_c_hurries():
    with program(DEAF, DEAF) as running:
        pids = running.pids(2)
        running.read_until("deaf", 2)
        running.popen.send_signal(signal.SIGINT)
        running.read_until("once more to hurry")
        running.popen.send_signal(signal.SIGINT)
        assert running.wait() == 0  # their grace is a minute
        assert not any(map(alive, pids))


def test_children_die_with_a_supervisor_that_is_killed():
    with program(DEAF, POLITE) as running:
        pids = running.pids(2)
        assert all(map(alive, pids))
        running.popen.kill()
        running.wait()
        wait_for(lambda: not any(map(alive, pids)))


def test_foreign_processes_are_left_alone():
    with contextlib.ExitStack() as stack:
        same = [sys.executable, "-c", POLITE]
        foreign = [
            stack.enter_context(subprocess.Popen(same, stdout=subprocess.DEVNULL)),
            stack.enter_context(
                subprocess.Popen(same, stdout=subprocess.DEVNULL, start_new_session=True)
            ),
        ]
        for process in foreign:
            stack.callback(process.kill)
        with program(POLITE, DEAF) as running:
            pids = running.pids(2)
            for _ in range(2):
                running.popen.send_signal(signal.SIGINT)
                time.sleep(0.2)
            assert running.wait() == 0
        assert not any(map(alive, pids))
        assert [process.poll() for process in foreign] == [None, None]


# --- what is asked before starting


@contextlib.contextmanager
def listening(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "::1"),
    ],
)
def test_a_busy_port_is_named_with_its_key_and_its_holder(held, wanted):
    with listening(held) as port:
        line = busy_listener(
            {"[admin] listen": Address("127.0.0.1", 0), "[server] listen": Address(wanted, port)}
        )
        name = Path("/proc/self/comm").read_text().strip()
        assert line == (
            f"port {port} of {wanted} is in use by pid {os.getpid()} ({name});"
            " [server] listen changes it"
        )


def test_free_ports_and_other_addresses_are_no_trouble():
    with listening("127.0.0.2") as port:
        assert busy_listener({"[server] listen": Address("127.0.0.1", port)}) is None


def test_a_port_whose_last_connection_has_just_closed_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # this end closes first: it is the one in TIME_WAIT
    assert busy_listener({"[server] listen": Address("127.0.0.1", port)}) is None


def test_an_address_of_another_machine_is_named():
    line = busy_listener({"[server] listen": Address("192.0.2.1", 8080)})
    assert line == (
        "cannot listen on 192.0.2.1:8080: Cannot assign requested address;"
        " [server] listen changes it"
    )


@pytest.mark.envoy
def test_the_envoy_found_is_one():
    version = subprocess.run(
        [find_envoy(), "--version"], capture_output=True, text=True, check=True
    )
    assert "version" in version.stdout
