"""Free ports of loopback for servers that a test starts; it holds none of them.

A port is chosen before its server binds it, often seconds before: Envoy waits for the sidecar. What
the kernel hands out (for port 0, and to each connection) could take it until then, and so could a
test of another worker. Hence ports below the kernel's range, and a share of them for each worker.
"""

import contextlib
import itertools
import os
import random
import socket

HOST = "127.0.0.1"
_FIRST, _END = 20_000, 32_000
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = range(_FIRST + _WORKER, _END, _WORKERS)
# Begun anywhere, for another run on this machine; a port just given comes again after all the others.
_turns = itertools.count(random.randrange(len(_SHARE)))


def free_ports(count: int) -> list[int]:
    found = []
    for turn in itertools.islice(_turns, len(_SHARE)):
        port = _SHARE[turn % len(_SHARE)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free port left")
