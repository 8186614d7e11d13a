"""`pointsman`: argument parsing only; each command calls one function."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

# Before numpy is imported anywhere: with more BLAS threads than cores to spare, a product of
# 200 x 512 took 8 ms instead of 7 us.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

_DESCRIPTION: Final = """\
Keeps LLM traffic on the right track: Envoy asks this sidecar which model should answer each
request, and falls back to the next one, with a counted reason, when a model does not.

first steps
  pointsman up --demo                    a gateway with three demo upstreams, on this machine
  pointsman check pointsman.toml         every fault of a configuration, with its line
  pointsman up --config pointsman.toml   the same gateway with your upstreams
  pointsman route "write a quicksort"    why a prompt goes where it goes
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pointsman",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"pointsman {metadata.version('pointsman')}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    up = commands.add_parser(
        "up",
        help="Envoy and the sidecar in the foreground, supervised",
        description="Start Envoy and the sidecar, restart what dies, print `ready URL` on stdout "
        "once the whole path answers. Ctrl-C or SIGTERM drains and ends both.",
    )
    source = up.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="the TOML configuration")
    source.add_argument(
        "--demo", action="store_true", help="an embedded configuration with three demo upstreams"
    )
    up.set_defaults(run=_up)

    serve = commands.add_parser(
        "serve",
        help="the sidecar alone, for an Envoy of yours",
        description="Serve ext_proc and the access log service on a Unix socket, and /metrics, "
        "/healthz and /readyz on [metrics] listen, until SIGTERM.",
    )
    serve.add_argument("--config", type=Path, required=True, metavar="FILE")
    serve.add_argument("--socket", metavar="PATH", help="instead of [extproc] socket")
    serve.set_defaults(run=_serve)

    check = commands.add_parser(
        "check",
        help="validate a configuration",
        description="Print one line per fault: file, line, key, what is wrong, how to mend it. "
        "Exit 0 when there is none, 2 otherwise.",
    )
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check)

    render = commands.add_parser(
        "render",
        help="print the Envoy bootstrap",
        description="Print the Envoy bootstrap as YAML, the same bytes each time. Keys are read "
        "by Envoy from its own environment and are not in it.",
    )
    render.add_argument("file", type=Path, metavar="FILE")
    render.add_argument("--socket", metavar="PATH", help="instead of [extproc] socket")
    render.set_defaults(run=_render)

    route = commands.add_parser(
        "route",
        help="explain where a prompt goes",
        description="Decide about one prompt as the sidecar would, and show every signal, score "
        "and threshold behind the decision. Without --config: the demo's routes.",
    )
    route.add_argument("text", metavar="TEXT")
    route.add_argument("--config", type=Path, metavar="FILE")
    route.add_argument("--json", action="store_true", help="for machines")
    route.set_defaults(run=_route)
    return parser


# Each command imports what it needs when it runs: `check` needs no gRPC, `--help` nothing at all.


def _up(arguments: argparse.Namespace) -> int:
    from extproc.app.up import StartError, up
    from extproc.config import ConfigError
    from extproc.demo import DEMO_CONFIG
    from extproc.embedding.model import ModelError
    from extproc.supervise import EnvoyNotFoundError

    path = DEMO_CONFIG if arguments.demo else arguments.config
    try:
        return up(path, demo=arguments.demo, say=_say)
    except ConfigError as error:
        return _report_faults(error)
    except (StartError, ModelError, EnvoyNotFoundError) as error:
        return _fail(error)


def _serve(arguments: argparse.Namespace) -> int:
    import uvloop

    from extproc.app.serve import serve
    from extproc.config import ConfigError, load
    from extproc.embedding.model import ModelError
    from extproc.serving.server import SocketBusyError

    try:
        config = load(arguments.config, environ=os.environ)
        if arguments.socket:
            config = dataclasses.replace(config, extproc_socket=arguments.socket)
        uvloop.run(serve(config, progress=_say))
    except ConfigError as error:
        return _report_faults(error)
    except (ModelError, SocketBusyError, OSError) as error:
        return _fail(error)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from extproc.config import ConfigError, load

    try:
        config = load(arguments.file, environ=os.environ)
    except ConfigError as error:
        return _report_faults(error)
    print(f"{arguments.file}: ok, {len(config.upstreams)} upstreams, {len(config.routes)} routes")
    return 0


def _render(arguments: argparse.Namespace) -> int:
    from extproc.config import ConfigError, load
    from extproc.envoyconf import render

    try:
        config = load(arguments.file, environ=None)
    except ConfigError as error:
        return _report_faults(error)
    if arguments.socket:
        config = dataclasses.replace(config, extproc_socket=arguments.socket)
    sys.stdout.write(render(config))
    return 0


def _route(arguments: argparse.Namespace) -> int:
    from extproc.app.explain import as_text, explain
    from extproc.config import ConfigError, load
    from extproc.demo import DEMO_CONFIG
    from extproc.embedding.model import ModelError

    try:
        config = load(arguments.config or DEMO_CONFIG, environ=None)
        explained = asyncio.run(explain(config, arguments.text, progress=_say))
    except ConfigError as error:
        return _report_faults(error)
    except ModelError as error:
        return _fail(error)
    if arguments.json:
        print(json.dumps(explained, ensure_ascii=False, indent=2))
    else:
        print(as_text(explained))
    return 0


def _report_faults(error: Exception) -> int:
    print(error, file=sys.stderr)
    return EXIT_USAGE


def _fail(error: Exception) -> int:
    print(f"pointsman: {error}", file=sys.stderr)
    return EXIT_FAILED


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
