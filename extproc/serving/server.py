"""Lifecycle of the sidecar's gRPC servers, on a Unix socket or on TCP: bind, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Any, Final

import grpc

from extproc.config import ExtprocTls, Foreign
from extproc.serving import wire
from extproc.serving.foreign import ForeignProcessor

_log = logging.getLogger(__name__)

_FRAMING_BYTES: Final = 1024 * 1024
"""Room for the headers and the framing around a body of the largest size."""


class SocketBusyError(Exception):
    """Another process answers on the socket's path."""


_MAX_AGE_MS: Final = 300_000
"""How long a connection lives, give or take a tenth: clients that balance connections, not requests,
come to know new replicas. Streams on it finish; the age ends none."""
_KEEPALIVE_MS: Final = 30_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_LEAST_PING_MS: Final = 5_000
"""A client may ask as often whether we live; gRPC's own limit of 5 minutes cuts Envoys that do."""


class SidecarServer:
    def __init__(
        self, *, socket_path: str, processor: Any, access_log: Any, max_body_bytes: int
    ) -> None:
        self._path = Path(socket_path)
        self._server = grpc.aio.server(options=_options(max_body_bytes))
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


class ForeignServer:
    """On TCP, for an Envoy that is not ours. Mutable state: whether it is serving."""

    def __init__(
        self,
        foreign: Foreign,
        *,
        processor: ForeignProcessor,
        max_body_bytes: int,
        max_age_ms: int = _MAX_AGE_MS,
    ) -> None:
        self._listen = foreign.listen
        self._tls = foreign.tls
        self._settle_s = foreign.settle_s
        self._processor = processor
        self._is_serving = False
        self._server = grpc.aio.server(
            options=[
                *_options(max_body_bytes),
                ("grpc.max_connection_age_ms", max_age_ms),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING_MS),
            ]
        )
        wire.add_processor(self._server, processor)
        wire.add_health(self._server, lambda: self._is_serving)

    async def start(self) -> None:
        """Raise OSError where the port cannot be had, or a file of [extproc.tls] not be read."""
        try:
            if self._tls is None:
                self._server.add_insecure_port(str(self._listen))
            else:
                self._server.add_secure_port(str(self._listen), _credentials(self._tls))
        except RuntimeError as error:
            raise OSError(f"[extproc] listen: cannot bind {self._listen}") from error
        await self._server.start()
        self._is_serving = True

    async def drain(self, grace_s: float) -> None:
        """Say that it ends, go on for as long as clients need to hear it, then let streams finish.

        A stream that only waits for an answer ends cleanly, and Envoy goes on without us.
        """
        self._is_serving = False
        await asyncio.sleep(self._settle_s)
        self._processor.drain()
        await self._server.stop(grace_s)


def _options(max_body_bytes: int) -> list[tuple[str, int]]:
    limit = max_body_bytes + _FRAMING_BYTES
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.so_reuseport", 0),
    ]


def _credentials(tls: ExtprocTls) -> grpc.ServerCredentials:
    """Read at every handshake, so that a renewed certificate needs no restart.

    A pair that cannot be read just then, as in the middle of a renewal, leaves the last one in place.
    """

    def read() -> grpc.ServerCertificateConfiguration:
        """Raise OSError where a file cannot be read, or the two do not belong together."""
        pair = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
        roots = Path(tls.client_ca_file).read_bytes() if tls.client_ca_file else None
        try:
            # gRPC takes anything, and then serves nobody.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                tls.cert_file, tls.key_file, password=""
            )
        except ssl.SSLError as error:
            raise OSError(
                f"[extproc.tls]: {tls.cert_file} and {tls.key_file} are no certificate and its key"
            ) from error
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        try:
            return read()
        except OSError as error:
            _log.warning("%s; the certificate read before stays in use", error)
            return None

    return grpc.dynamic_ssl_server_credentials(
        read(), renewed, require_client_authentication=tls.client_ca_file is not None
    )


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
