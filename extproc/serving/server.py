"""Lifecycle of the sidecar's gRPC server on its Unix socket: bind, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any, Final

import grpc

from extproc.serving import wire

_FRAMING_BYTES: Final = 1024 * 1024
"""Room for the headers and the framing around a body of the largest size."""


class SocketBusyError(Exception):
    """Another process answers on the socket's path."""


class SidecarServer:
    def __init__(
        self, *, socket_path: str, processor: Any, access_log: Any, max_body_bytes: int
    ) -> None:
        self._path = Path(socket_path)
        limit = max_body_bytes + _FRAMING_BYTES
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
            ]
        )
        wire.add_servicers(self._server, processor=processor, access_log=access_log)

    async def start(self) -> None:
        """Raise OSError, or SocketBusyError where another sidecar is alive on the path."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(self._path)
        self._server.add_insecure_port(f"unix:{self._path}")
        await self._server.start()

    async def drain(self, grace_s: float) -> None:
        """Let streams in flight finish for at most `grace_s` seconds."""
        await self._server.stop(grace_s)
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(self._path.unlink)


def _remove_stale(path: Path) -> None:
    """A socket left by a killed sidecar would keep the next one from binding."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):  # noqa: PTH116  mode bits, not existence
            raise SocketBusyError(f"{path} exists and is not a socket; remove it or choose another")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise SocketBusyError(f"another sidecar serves on {path}; stop it or set [extproc] socket")
