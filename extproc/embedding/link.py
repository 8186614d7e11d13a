"""One worker process and the socket to it: frames out, replies in, its exit; no queue, no deadline."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from extproc.embedding.frames import FrameError, Job, Reply, ReplyReader, encode
from extproc.embedding.model import ModelFiles

_RECV_BYTES: Final = 1 << 16
_EXIT_GRACE_S: Final = 1.0
"""How long a worker may live on after its end of the socket closed."""


@dataclass(frozen=True, slots=True)
class Closed:
    """No more replies: the worker closed the socket, or (`garbled`) what it sent is no frame."""

    garbled: bool


Tell = Callable[[Reply | Closed], None]
"""Called from the event loop with what comes from the worker, never after `close`."""


class Link(Protocol):
    """What the pool needs of a worker."""

    @property
    def pid(self) -> int: ...

    def send(self, job: Job) -> bool:
        """Whether the worker took it; False: it is dead or dying. Never blocks."""

    def close(self) -> None:
        """Ask it to exit, by closing the socket."""

    def kill(self) -> None: ...

    def resident_bytes(self) -> int: ...

    async def exited(self) -> int:
        """The exit status; negative: the signal."""


Launch = Callable[[ModelFiles, Tell], Awaitable[Link]]


async def launch(files: ModelFiles, tell: Tell) -> Link:
    """Start a worker; raises OSError, and nothing is left behind then."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        try:
            process = await asyncio.to_thread(_spawn, files, theirs.fileno())
            try:
                return _ProcessLink(process, ours, tell)
            except BaseException:
                process.kill()
                process.wait()  # there is nobody else to reap it, and it has hardly begun
                raise
        except RuntimeError as error:  # how Python says that there is no thread to be had
            ours.close()
            raise OSError(errno.EAGAIN, str(error)) from error
        except BaseException:
            ours.close()
            raise


def _spawn(files: ModelFiles, fd: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter, by vfork, and off the loop.

    uvloop's own subprocesses fork, which runs gRPC's fork handlers in the middle of its traffic.
    """
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", "extproc.embedding.worker"]
    command += [str(fd), str(files.onnx), str(files.tokenizer), str(files.dimension), files.digest]
    command += [str(files.max_tokens)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the parent's stdout is a contract
        pass_fds=(fd,),
    )


class _ProcessLink:
    """Mutable: `_open`, until either side closes; the reader's unfinished frame."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, tell: Tell) -> None:
        self._process = process
        self._sock = sock
        self._tell = tell
        self._reader = ReplyReader()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._status: asyncio.Future[int] = self._loop.create_future()
        # A thread, since a signal handler is the application's and a pidfd not to be had everywhere.
        threading.Thread(target=self._reap, name=f"reap-{process.pid}", daemon=True).start()
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, job: Job) -> bool:
        if not self._open:
            return False
        frame = encode(job)
        try:
            # One job is in flight at a time and is smaller than the socket's buffer.
            return self._sock.send(frame) == len(frame)
        except OSError:
            return False

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def resident_bytes(self) -> int:
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0  # it is gone: its exit tells the rest
        return pages * os.sysconf("SC_PAGESIZE")

    async def exited(self) -> int:
        status = await asyncio.shield(self._status)
        self._readable()  # its last words may still lie in the socket
        return status

    def _reap(self) -> None:
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            self._loop.call_soon_threadsafe(self._status.set_result, status)

    def _readable(self) -> None:
        if not self._open:
            return
        try:
            data = self._sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            replies = self._reader.feed(data)
        except FrameError:
            self._end(garbled=True)
            return
        for reply in replies:
            self._tell(reply)
        if not data and self._open:
            self._end(garbled=False)

    def _end(self, *, garbled: bool) -> None:
        self.close()
        self._loop.call_later(0 if garbled else _EXIT_GRACE_S, self.kill)
        self._tell(Closed(garbled))
