"""`pointsman`: argument parsing only; each command calls one function."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from extproc.core.errors import FallbackReason, Outcome, RouteReason

if TYPE_CHECKING:
    from extproc.config import Files

# Before numpy is imported anywhere: with more BLAS threads than cores to spare, a product of
# 200 x 512 took 8 ms instead of 7 us.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# onnxruntime reports its use to its maker unless it is told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

_FAULTS: Final = "5xx, refused, reset, bad_schema, flaky, slow_first_token, cut_stream"

_DESCRIPTION: Final = """\
Keeps LLM traffic on the right track: Envoy asks this sidecar which model should answer each
request, and falls back to the next one, with a counted reason, when a model does not.

first steps
  pointsman up --demo                    a gateway with three demo upstreams, on this machine
  pointsman check pointsman.toml         every fault of a configuration, with its line
  pointsman up --config pointsman.toml   the same gateway with your upstreams
  pointsman route "write a quicksort"    why a prompt goes where it goes
  pointsman eval labelled.jsonl          how often that is right, and the best thresholds
  pointsman drill                        a model hangs: who waits, for how long, until when
  pointsman tail                         requests as they end, coloured by outcome
  pointsman audit                        whether every request is accounted for
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
        description="Serve ext_proc and the access log service on a Unix socket, the status page, "
        "/metrics, /healthz and /readyz on [metrics] listen, until SIGTERM. With [extproc] listen: ext_proc "
        "on TCP, for an Envoy that pointsman did not render (Envoy Gateway, Istio).",
    )
    serve.add_argument("--config", type=Path, required=True, metavar="FILE")
    serve.add_argument("--socket", metavar="PATH", help="instead of [extproc] socket")
    serve.set_defaults(run=_serve)

    check = commands.add_parser(
        "check",
        help="validate a configuration",
        description="Print one line per fault: file, line, key, what is wrong, how to mend it. "
        "Exit 0 when there is none, 2 otherwise. Certificates, key files and environment variables "
        "with keys are judged where they are there; where not, a warning says so: this need not be the "
        "machine that serves.",
    )
    check.add_argument("file", type=Path, metavar="FILE")
    check.set_defaults(run=_check)

    render = commands.add_parser(
        "render",
        help="print the Envoy bootstrap",
        description="Print the Envoy bootstrap as YAML, the same bytes each time. Keys are read "
        "by Envoy from its own environment, or from files, and are not in it.",
    )
    render.add_argument("file", type=Path, metavar="FILE")
    render.add_argument(
        "--write",
        action="store_true",
        help="write it as envoy.yaml into the folder of the socket instead, with the files that it "
        "refers to where [server.tls], [server.auth], api_key_file or ca_file are used; every file "
        "of the configuration must be there and fit",
    )
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
    route.add_argument(
        "--header",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a header of the request, for rules that look at it; may be repeated",
    )
    route.add_argument(
        "--has",
        choices=("images", "tools"),
        action="append",
        default=[],
        help="what the request holds besides text; may be repeated",
    )
    route.add_argument("--json", action="store_true", help="for machines")
    route.set_defaults(run=_route)

    _add_drill(commands)
    _add_watching(commands)

    evaluation = commands.add_parser(
        "eval",
        help="how well labelled prompts are routed",
        description='Route the prompts of a JSONL file, {"text": "...", "route": "..." or null} a '
        "line (null: it belongs to no route), and print accuracy, confusion, the best thresholds and "
        "the time a decision takes. Without --config: the demo's routes.",
    )
    evaluation.add_argument("data", type=Path, metavar="DATA")
    evaluation.add_argument("--config", type=Path, metavar="FILE")
    evaluation.add_argument(
        "--limit", type=_count, metavar="N", help="only N of the prompts, drawn evenly"
    )
    evaluation.add_argument("--json", action="store_true", help="for machines")
    evaluation.add_argument(
        "--report", type=Path, metavar="FILE.html", help="write a report for the browser"
    )
    evaluation.add_argument(
        "--write-thresholds",
        type=Path,
        metavar="FILE",
        help="write the configuration with the best thresholds: a new file, or --config itself",
    )
    evaluation.set_defaults(run=_eval)

    export = commands.add_parser(
        "export-model",
        help="turn a sentence-transformers model into one for [router.encoder] path",
        description="Write a sentence-transformers model as one ONNX graph with pooling and "
        "normalisation inside, its tokeniser beside it, into a new folder OUT, and compare it with the "
        "original: under a cosine of 0.98 nothing is written. Needs the extra export. With --static "
        "alone: build the static encoder, which decides under overload, into $POINTSMAN_CACHE, else "
        "~/.cache/pointsman, so that no start has to.",
    )
    export.add_argument("model", nargs="?", metavar="MODEL", help="a folder, or a name on the hub")
    export.add_argument("out", nargs="?", type=Path, metavar="OUT", help="a folder to be made")
    export.add_argument(
        "--fp32",
        action="store_true",
        help="keep 32 bits, four times the size and half the speed; without it: 8 bits for AVX-512 VNNI",
    )
    export.add_argument(
        "--static",
        action="store_true",
        help="the static encoder's table, from the default model's weights",
    )
    export.set_defaults(run=_export_model, misused=export.error)
    return parser


def _add_drill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    drill = commands.add_parser(
        "drill",
        help="break an upstream on purpose and see what follows",
        description="Break an upstream under load, watch the fallback and the recovery, and check "
        "what must follow. Without --url: on a gateway of its own. Exit 0 if everything held, 1 if "
        "not, 2 for a drill that makes no sense.",
    )
    drill.add_argument(
        "--fault",
        nargs="+",
        action="extend",
        metavar="FAULT",
        help=f"hang (the default), {_FAULTS}, or all of them: `all`",
    )
    drill.add_argument("--rps", type=float, default=10.0, help="requests a second (default: 10)")
    drill.add_argument(
        "--article",
        action="store_true",
        help="5 failures in 30 s, 5 s timeout, 30 s cooldown; without it the times are shorter",
    )
    drill.add_argument("--url", metavar="URL", help="a running gateway with demo upstreams, here")
    drill.add_argument("--upstream", metavar="ID", help="with --url: the upstream to break")
    drill.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="with --url: its configuration, if not the demo's",
    )
    drill.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="with --url: the environment variable that holds a key for [server.auth]",
    )
    drill.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="with --url https://...: the CA of its certificate, if not one of the system's; the "
        "name in it is not compared, for a drill stays on this machine",
    )
    drill.add_argument("--json", action="store_true", help="for machines; progress goes to stderr")
    drill.set_defaults(run=_drill)


def _add_watching(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    audit = commands.add_parser(
        "audit",
        help="whether every request of a running gateway is accounted for",
        description="Compare Envoy's own counters with the sidecar's, and name every difference. "
        "Without --config: the demo's addresses. Exit 0 if everything adds up, 1 if not.",
    )
    audit.add_argument("--config", type=Path, metavar="FILE", help="of the running gateway")
    audit.add_argument(
        "--wait",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long a difference may take to close (default: 10)",
    )
    audit.add_argument("--json", action="store_true", help="for machines")
    audit.set_defaults(run=_audit)

    tail = commands.add_parser(
        "tail",
        help="the requests of a running gateway, as they end",
        description="One line a request, coloured by outcome, until Ctrl-C. Options that name values "
        "show only those; given twice, either. Without --config: the demo's addresses.",
    )
    tail.add_argument("--config", type=Path, metavar="FILE", help="of the running gateway")
    for key in ("route", "upstream"):
        tail.add_argument(f"--{key}", action="append", default=[], metavar=key.upper())
    closed = (("outcome", Outcome), ("reason", RouteReason), ("fallback", FallbackReason))
    for key, values in closed:
        tail.add_argument(
            f"--{key}",
            action="append",
            default=[],
            metavar=key.upper(),
            choices=[each.value for each in values],
            help="one of " + ", ".join(each.value for each in values),
        )
    tail.add_argument("--id", default="", metavar="ID", help="one request, by x-request-id")
    tail.add_argument("--count", type=_count, metavar="N", help="end after N requests")
    tail.add_argument("--no-color", action="store_true", help="as without a terminal, or NO_COLOR")
    tail.add_argument("--json", action="store_true", help="for machines")
    tail.set_defaults(run=_tail)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.strip().lower(), value.strip()


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count from 1 up")
    return int(text)


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

    from extproc.app.logs import configure
    from extproc.app.serve import TracingMissingError, serve
    from extproc.config import ConfigError, LogFormat, load
    from extproc.embedding.model import ModelError
    from extproc.serving.server import SocketBusyError

    try:
        config = load(arguments.config, environ=os.environ)
        if arguments.socket:
            if config.foreign is not None:
                return _misuse("--socket: the configuration has [extproc] listen instead")
            config = dataclasses.replace(config, extproc_socket=arguments.socket)
        configure(config.log)
        is_json = config.log.format is LogFormat.JSON
        progress = logging.getLogger("pointsman").info if is_json else _say
        uvloop.run(serve(config, progress=progress))
    except ConfigError as error:
        return _report_faults(error)
    except (ModelError, SocketBusyError, TracingMissingError, OSError) as error:
        return _fail(error)
    return 0


def _files(*, insist: bool) -> Files:
    from extproc.config import Fault, Files

    def warn(fault: Fault) -> None:
        _say(f"warning: {fault}")

    return Files(now_s=time.time(), warn=warn, insist=insist)


def _check(arguments: argparse.Namespace) -> int:
    from extproc.app.advice import on_thresholds
    from extproc.config import ConfigError, load

    try:
        # A laptop or CI need not have certificates and keys; what is there is judged.
        config = load(arguments.file, environ=os.environ, files=_files(insist=False))
    except ConfigError as error:
        return _report_faults(error)
    print(f"{arguments.file}: ok, {len(config.upstreams)} upstreams, {len(config.routes)} routes")
    if note := on_thresholds(config):
        print(note)
    return 0


def _render(arguments: argparse.Namespace) -> int:
    from extproc.app.envoy_files import install
    from extproc.config import SERVE_ONLY, ConfigError, Unfit, load
    from extproc.envoyconf import render

    try:
        files = _files(insist=True) if arguments.write else None
        config = load(arguments.file, environ=None, files=files)
    except ConfigError as error:
        return _report_faults(error)
    if config.foreign is not None:
        return _misuse(f"{arguments.file}: {SERVE_ONLY}")
    if arguments.socket:
        config = dataclasses.replace(config, extproc_socket=arguments.socket)
    if not arguments.write:
        sys.stdout.write(render(config))
        return 0
    try:
        print(install(config))
    except (Unfit, OSError) as error:
        return _fail(error)
    return 0


def _route(arguments: argparse.Namespace) -> int:
    from extproc.app.explain import as_text, explain
    from extproc.config import ConfigError, load
    from extproc.core.errors import Content
    from extproc.demo import DEMO_CONFIG
    from extproc.embedding.model import ModelError

    try:
        config = load(arguments.config or DEMO_CONFIG, environ=None)
        explained = asyncio.run(
            explain(
                config,
                arguments.text,
                headers=arguments.header,
                has=[Content(each) for each in arguments.has],
                progress=_say,
            )
        )
    except ConfigError as error:
        return _report_faults(error)
    except ModelError as error:
        return _fail(error)
    if arguments.json:
        print(json.dumps(explained, ensure_ascii=False, indent=2))
    else:
        print(as_text(explained))
    return 0


def _drill(arguments: argparse.Namespace) -> int:
    from extproc.app.drill import Options, drill
    from extproc.config import ConfigError
    from extproc.drill.plan import PlanError, parse_faults
    from extproc.drill.report import document
    from extproc.drill.target import DrillError
    from extproc.supervise import EnvoyNotFoundError

    try:
        options = Options(
            faults=parse_faults(arguments.fault or ["hang"]),
            rps=arguments.rps,
            article=arguments.article,
            url=arguments.url,
            upstream=arguments.upstream,
            config=arguments.config,
            api_key_env=arguments.api_key_env,
            ca_file=arguments.ca_file,
        )
        reports = drill(options, show=_say if arguments.json else _show)
    except (PlanError, ConfigError) as error:
        return _report_faults(error)
    except (DrillError, EnvoyNotFoundError) as error:
        return _fail(error)
    if arguments.json:
        print(json.dumps(document(reports), ensure_ascii=False, indent=2))
    return 0 if all(report.held for report in reports) else EXIT_FAILED


def _audit(arguments: argparse.Namespace) -> int:
    from extproc.app.audit import AuditError, as_json, as_text, audit
    from extproc.config import ConfigError

    try:
        found = audit(arguments.config, wait_s=arguments.wait)
    except ConfigError as error:
        return _report_faults(error)
    except AuditError as error:
        return _fail(error)
    print(json.dumps(as_json(found), indent=2) if arguments.json else as_text(found))
    return 0 if found.adds_up else EXIT_FAILED


def _tail(arguments: argparse.Namespace) -> int:
    from extproc.app.tail import Filter, TailError, tail
    from extproc.config import ConfigError

    chosen = Filter(
        outcomes=tuple(arguments.outcome),
        routes=tuple(arguments.route),
        reasons=tuple(arguments.reason),
        upstreams=tuple(arguments.upstream),
        fallbacks=tuple(arguments.fallback),
        id=arguments.id,
    )
    colour = sys.stdout.isatty() and not arguments.no_color and not os.environ.get("NO_COLOR")
    try:
        tail(
            arguments.config,
            chosen,
            show=_show,
            as_json=arguments.json,
            colour=colour,
            count=arguments.count,
        )
    except ConfigError as error:
        return _report_faults(error)
    except TailError as error:
        return _fail(error)
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from extproc.app.evaluate import DataError, EvalError, Order, run
    from extproc.config import ConfigError
    from extproc.demo import DEMO_CONFIG
    from extproc.embedding.model import ModelError

    order = Order(
        data=arguments.data,
        config=arguments.config or DEMO_CONFIG,
        limit=arguments.limit,
        as_json=arguments.json,
        report=arguments.report,
        thresholds=arguments.write_thresholds,
    )
    try:
        run(order, show=print, say=_say)
    except (ConfigError, DataError) as error:
        return _report_faults(error)
    except (EvalError, ModelError, OSError) as error:
        return _fail(error)
    return 0


def _export_model(arguments: argparse.Namespace) -> int:
    from extproc.embedding.model import ModelError

    if arguments.static == (arguments.model is not None) or (arguments.static and arguments.fp32):
        arguments.misused("give MODEL and OUT, or --static alone")
    if arguments.model is not None and arguments.out is None:
        arguments.misused("OUT is missing: the folder to write the model into")
    try:
        if arguments.static:
            from extproc.embedding.distill import ensure_static
            from extproc.embedding.model import default_cache_dir

            print(ensure_static(default_cache_dir(os.environ), progress=_say).table)
        else:
            from extproc.app.export import export_model

            precision: Literal["int8", "fp32"] = "fp32" if arguments.fp32 else "int8"
            export_model(arguments.model, arguments.out, precision=precision, show=_show, say=_say)
    except ModelError as error:
        return _fail(error)
    return 0


def _report_faults(error: Exception) -> int:
    print(error, file=sys.stderr)
    return EXIT_USAGE


def _misuse(problem: str) -> int:
    print(f"pointsman: {problem}", file=sys.stderr)
    return EXIT_USAGE


def _fail(error: Exception) -> int:
    print(f"pointsman: {error}", file=sys.stderr)
    return EXIT_FAILED


def _show(line: str) -> None:
    print(line, flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
