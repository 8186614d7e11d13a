"""`python -m extproc.demo`: scripted upstreams in one process; it reads no config."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from extproc.demo.upstream import ScriptedUpstream

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_USAGE: Final = 2


class Listen(NamedTuple):
    host: str
    port: int
    name: str


def parse_listen(text: str) -> Listen:
    """`127.0.0.1:18081=coder`, or `[::1]:18081=coder`."""
    address, _, name = text.partition("=")
    host, _, port = address.rpartition(":")
    if not (host and name and port.isascii() and port.isdecimal() and int(port) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT=NAME")
    return Listen(host.removeprefix("[").removesuffix("]"), int(port), name)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m extproc.demo", description="OpenAI-shaped upstreams that fail when told to."
    )
    parser.add_argument(
        "--listen", action="append", required=True, type=parse_listen, metavar="HOST:PORT=NAME"
    )
    parser.add_argument("--chunk-gap", type=float, default=0.02, metavar="SECONDS")
    parser.add_argument(
        "--exit-with-stdin", action="store_true", help="end when the pipe on stdin closes"
    )
    arguments = parser.parse_args(argv)
    names = [listen.name for listen in arguments.listen]
    if len(set(names)) < len(names):
        parser.error("each --listen needs a name of its own")
    return arguments


async def serve(
    listens: Sequence[Listen], *, chunk_gap_s: float = 0.02, exit_with_stdin: bool = False
) -> int:
    """Serve until a signal, or the end of stdin; the exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        try:
            loop.add_reader(0, _stop_at_end, stop)
        except OSError:  # epoll takes no files
            sys.stderr.write("demo upstreams: --exit-with-stdin needs a pipe on stdin\n")
            return EXIT_USAGE

    upstreams: dict[str, ScriptedUpstream] = {}
    async with AsyncExitStack() as stack:
        for listen in listens:
            upstream = ScriptedUpstream(
                listen.name, listen.host, listen.port, chunk_gap_s=chunk_gap_s, siblings=upstreams
            )
            try:
                await upstream.start()
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else str(error)
                where = f"{listen.host}:{listen.port}"
                sys.stderr.write(
                    f"demo upstreams: cannot listen on {where} for {listen.name}: {why}\n"
                )
                return EXIT_USAGE
            stack.push_async_callback(upstream.aclose)
            upstreams[upstream.name] = upstream
        ready = ", ".join(f"{name} {upstream.base_url}" for name, upstream in upstreams.items())
        sys.stdout.write(f"demo upstreams ready: {ready}\n")
        sys.stdout.flush()
        await stop.wait()
    return 0


def _stop_at_end(stop: asyncio.Event) -> None:
    if not os.read(0, 65_536):
        stop.set()


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return asyncio.run(
        serve(
            arguments.listen,
            chunk_gap_s=arguments.chunk_gap,
            exit_with_stdin=arguments.exit_with_stdin,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
