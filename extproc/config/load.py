"""TOML text -> `Config`: which tables and keys there are, and the rules that span several of them.

It knows no file but the one it is given, opens no socket, and reads the environment it is handed.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.config import files as f
from extproc.config import values as v
from extproc.config.faults import ConfigError, Fault, quoted
from extproc.config.locate import Lines, locate
from extproc.config.model import (
    Address,
    Auth,
    Config,
    Encoder,
    ExtprocTls,
    Fallback,
    FallbackMode,
    Foreign,
    Log,
    LogFormat,
    LogLevel,
    Retry,
    Route,
    Router,
    Server,
    Tls,
    TlsVersion,
    Tracing,
    UnknownModel,
    Upstream,
)
from extproc.config.table import Document, Known, Table, dotted
from extproc.core.circuit import CircuitPolicy
from extproc.core.errors import Content, FallbackReason
from extproc.core.wire_names import EXPLICIT_ROUTE, RULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["ConfigError", "Fault", "Files", "known_keys", "load", "parse"]

COUNTABLE: Final = (
    FallbackReason.TIMEOUT,
    FallbackReason.SERVER_ERROR,
    FallbackReason.CONNECT_ERROR,
    FallbackReason.BAD_SCHEMA,
    FallbackReason.RATE_LIMITED,
)
"""What the breaker can count. The other reasons are its own doing, ours, or the client's."""

_ONLY_ROUTE: Final = "default"
"""The route of a file that has none, and the default route of a file that names none."""

# The values stand in model.py, once.
_DEFAULT: Final = Config(upstreams={}, routes=(), router=Router(default=_ONLY_ROUTE))
_DEFAULT_UPSTREAM: Final = Upstream(id="", name="", base_url="", model="")

_SYNTAX_MENDS: Final = (
    ("Cannot declare", "write each table once and keep its keys together"),
    ("Cannot overwrite", "the key or table is there twice: keep one"),
    ("Cannot mutate", "the table was closed where it began: put all its keys there"),
    ("Duplicate", "keep one of the two"),
    ("Illegal character", "close the quotes on the line where they open, or use three of them"),
    ("Unclosed", "close the bracket"),
    ("Unterminated", "close the quotes"),
    ("Invalid value", 'put text, durations and addresses in double quotes, as in listen = ":8080"'),
    ("Expected newline", "write one key = value on each line, with text in double quotes"),
)


@dataclass(frozen=True, slots=True)
class Files:
    """How to look at the certificates and keys that a configuration names, in files and variables."""

    now_s: float
    """Since 1970."""
    warn: Callable[[Fault], None]
    insist: bool = True
    """Whether a file that cannot be read and a variable that is not set are faults; if not, they are only
    told: a laptop has none.
    """


def load(
    path: str | Path, *, environ: Mapping[str, str] | None, files: Files | None = None
) -> Config:
    """Read and parse a file; see `parse`."""
    file = str(path)
    try:
        data = Path(path).read_bytes()
    except IsADirectoryError:
        fault = Fault(file, 1, "file", "is a directory", "name the TOML file itself")
        raise ConfigError([fault]) from None
    except OSError as error:
        fault = Fault(file, 1, "file", f"cannot be read: {error.strerror}", "check path and rights")
        raise ConfigError([fault]) from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        problem = "is UTF-16, not UTF-8" if utf16 else "is not UTF-8 from this line on"
        fault = Fault(file, line, "file", problem, "save it as UTF-8")
        raise ConfigError([fault]) from None
    return parse(text, file=file, environ=environ, files=files)


def parse(
    text: str, *, file: str, environ: Mapping[str, str] | None, files: Files | None = None
) -> Config:
    """The configuration that a text describes, or `ConfigError` with every fault in it.

    `file` is only named in faults. `environ` None: whether the variables with keys in them are set
    does not matter, as when a bootstrap is rendered on another machine; nor, with `files` None,
    does what is in the files that it names.
    """
    text = text.removeprefix("\ufeff")  # what some editors put in front of UTF-8
    try:
        raw, lines = tomllib.loads(text), locate(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([_syntax_fault(error, text, file)]) from None
    document = Document(file, lines)
    root = Table(document, (), "", raw)
    config = _config(root)
    if files is not None:
        _check_files(document, config, files)
    if environ is not None:
        _check_secrets(document, config, environ, files)
    if not text.strip():
        document.faults = [Fault(file, 1, "file", "is empty", "start from docs/configuration.md")]
    document.refuse_unknown(known_keys())
    if document.faults:
        raise ConfigError(document.faults)
    return config


@cache
def known_keys() -> Known:
    """Every key that a file may hold, by table."""
    document = Document("", Lines({}))
    _config(Table(document, (), "", {"upstream": {"id": {}}, "route": [{}]}))
    return document.known()


def _syntax_fault(error: Exception, text: str, file: str) -> Fault:
    if isinstance(error, RecursionError):
        return Fault(file, 1, "syntax", "arrays or tables are nested too deeply", "flatten them")
    if not isinstance(error, tomllib.TOMLDecodeError):
        # Python refuses to read so long an integer, and does not say where it stands.
        digits = re.search(r"[0-9_]{1000}", text)
        line = text.count("\n", 0, digits.start() if digits else 0) + 1
        return Fault(file, line, "syntax", "a number has too many digits", "shorten it")
    message, _, position = str(error).partition(" (at ")
    found = re.match(r"line (\d+), column (\d+)", position)
    line = int(found[1]) if found else text.rstrip().count("\n") + 1
    message = re.sub(r"\('(.*)',?\)", lambda key: key[1].replace("', '", "."), message)
    where = f"in column {found[2]}" if found else "at the end of the file"
    mends = (mend for opening, mend in _SYNTAX_MENDS if message.startswith(opening))
    mend = next(mends, "see https://toml.io for how TOML is written")
    return Fault(file, line, "syntax", f"not valid TOML {where}: {message}", mend)


def _config(root: Table) -> Config:
    server, admin, metrics, health = (
        root.child(key) for key in ("server", "admin", "metrics", "health")
    )
    read_server = _server(server)
    extproc = root.child("extproc")
    foreign = _foreign(extproc)
    upstreams = _upstreams(root, read_server, is_foreign=foreign is not None)
    routes = _routes(root, upstreams)
    config = Config(
        upstreams=upstreams,
        routes=routes or (Route(name=_ONLY_ROUTE, upstreams=tuple(upstreams)),),
        router=_router(root, upstreams, routes),
        server=read_server,
        admin=admin.get("listen", v.address, _DEFAULT.admin),
        metrics=metrics.get("listen", v.address, _DEFAULT.metrics),
        envoy_metrics=metrics.get("envoy_listen", v.address, _DEFAULT.envoy_metrics),
        health=health.get("listen", v.address, _DEFAULT.health),
        extproc_socket=extproc.get("socket", v.socket_path, _DEFAULT.extproc_socket),
        foreign=foreign,
        circuit=_circuit(root.child("circuit_breaker")),
        fallback=_fallback(root.child("fallback")),
        retry=_retry(root.child("retry")),
        log=_log(root.child("log")),
        tracing=_tracing(root.child("tracing")),
    )
    listeners = [(metrics, "listen", config.metrics), (health, "listen", config.health)]
    if foreign is None:
        listeners += [
            (server, "listen", read_server.listen),
            (admin, "listen", config.admin),
            (metrics, "envoy_listen", config.envoy_metrics),
        ]
    else:  # another Envoy has listeners of its own
        _refuse_doors(server)
        listeners.append((extproc, "listen", foreign.listen))
    _refuse_clashes(
        {(table, key): address for table, key, address in listeners if address is not None}
    )
    return config


def _foreign(table: Table) -> Foreign | None:
    default = Foreign(Address("", 0))
    listen = table.get("listen", v.address, None)
    settle_s = table.get("settle", v.limit, default.settle_s) or 0.0
    tls = _extproc_tls(table)
    if not table.given("listen"):
        if table.given("tls"):
            table.fault("tls", "has no use without listen", "add listen, or remove it")
        return None
    if table.given("socket"):
        mend = "keep socket for the Envoy of pointsman render, listen for any other"
        table.fault("socket", "stands beside listen", mend)
    return Foreign(listen or default.listen, tls, settle_s)


def _extproc_tls(extproc: Table) -> ExtprocTls | None:
    table = extproc.child("tls")
    tls = ExtprocTls(
        cert_file=table.get("cert_file", v.file_path, ""),
        key_file=table.get("key_file", v.file_path, ""),
        client_ca_file=table.get("client_ca_file", v.file_path, None),
    )
    if not isinstance(extproc.raw("tls"), dict):
        return None
    for key in ("cert_file", "key_file"):
        if not table.given(key):
            table.fault(key, "is missing", f'add {key} = "/PATH", in PEM')
    return tls


def _server(table: Table) -> Server:
    default = _DEFAULT.server
    return Server(
        listen=table.get("listen", v.address, default.listen),
        read_timeout_s=table.get("read_timeout", v.duration, default.read_timeout_s),
        write_timeout_s=table.get("write_timeout", v.duration, default.write_timeout_s),
        request_timeout_s=table.get("request_timeout", v.limit, default.request_timeout_s),
        max_body_bytes=table.get("max_body", v.size, default.max_body_bytes),
        tls=_tls(table),
        auth=_auth(table),
    )


def _tls(server: Table) -> Tls | None:
    table = server.child("tls")
    tls = Tls(
        cert_file=table.get("cert_file", v.file_path, ""),
        key_file=table.get("key_file", v.file_path, ""),
        client_ca_file=table.get("client_ca_file", v.file_path, None),
        min_version=table.get("min_version", v.choice(TlsVersion), Tls("", "").min_version),
    )
    if not isinstance(server.raw("tls"), dict):
        return None
    for key in ("cert_file", "key_file"):
        if not table.given(key):
            table.fault(key, "is missing", f'add {key} = "/PATH", in PEM')
    return tls


def _auth(server: Table) -> Auth | None:
    table = server.child("auth")
    auth = Auth(keys_file=table.get("keys_file", v.file_path, ""))
    if not isinstance(server.raw("auth"), dict):
        return None
    if not table.given("keys_file"):
        mend = 'add keys_file = "/PATH", with a client\'s id and its key on each line'
        table.fault("keys_file", "is missing", mend)
    return auth


def _refuse_clashes(listeners: Mapping[tuple[Table, str], Address]) -> None:
    def line(listener: tuple[tuple[Table, str], Address]) -> tuple[bool, int]:
        table, key = listener[0]
        return table.given(key), table.line(key)

    for pair in combinations(listeners.items(), 2):
        # To blame is the later line; never a default, which has none.
        ((table, key), address), ((other, its_key), taken) = sorted(pair, key=line, reverse=True)
        hosts = {address.host, taken.host}
        if address.port != taken.port or (len(hosts) == 2 and not hosts & {"0.0.0.0", "::"}):  # noqa: S104
            continue
        if table.fit(key) and other.fit(its_key):
            by = f"{other.label} {its_key} = {quoted(str(taken))}"
            default = "" if other.given(its_key) else ", its default"
            problem = f"port {address.port} is taken by {by}{default}"
            table.fault(key, problem, "give one of them another port")


def _upstreams(root: Table, server: Server, *, is_foreign: bool) -> dict[str, Upstream]:
    tables = root.children("upstream", "ID", v.name(RULE))
    if not root.raw("upstream") and root.fit("upstream"):
        root.fault("upstream", "is missing", "add [upstream.ID] with base_url and model")
    names = {id_: id_ for id_ in tables}
    upstreams = {id_: _upstream(id_, table, names) for id_, table in tables.items()}
    for id_, table in tables.items():
        _check_time(table, upstreams[id_], server)
        _check_key_and_ca(table, upstreams[id_])
        if is_foreign:
            _refuse_keys(table)
    return upstreams


def _upstream(id_: str, table: Table, names: dict[str, str]) -> Upstream:
    default = _DEFAULT_UPSTREAM
    name = table.get("name", v.name(RULE), id_)
    owner = names.setdefault(name, id_)
    if owner != id_:
        problem = f"{quoted(name)} is already the id or name of {_label(owner)}"
        table.fault("name", problem, "choose another name")
    return Upstream(
        id=id_,
        name=name,
        base_url=table.need(
            "base_url", v.base_url, "", mend='add base_url = "https://HOST/PATH" of the provider'
        ),
        model=table.need("model", v.model, "", mend='add model = "..." as the provider calls it'),
        api_key_env=table.get("api_key_env", v.env_name, default.api_key_env),
        api_key_file=table.get("api_key_file", v.file_path, default.api_key_file),
        ca_file=table.get("ca_file", v.file_path, default.ca_file),
        inference_timeout_s=table.get("inference_timeout", v.duration, default.inference_timeout_s),
        first_token_timeout_s=table.get(
            "first_token_timeout", v.duration, default.first_token_timeout_s
        ),
        connect_timeout_s=table.get("connect_timeout", v.duration, default.connect_timeout_s),
        max_concurrent_requests=table.get(
            "max_concurrent_requests", v.integer(1), default.max_concurrent_requests
        ),
    )


def _label(id_: str) -> str:
    return f"[{dotted(('upstream', id_))}]"


def _check_time(table: Table, upstream: Upstream, server: Server) -> None:
    longest_s = upstream.connect_timeout_s + upstream.inference_timeout_s
    allowed_s = server.request_timeout_s
    fit = table.fit("connect_timeout") and table.fit("inference_timeout")
    if fit and allowed_s is not None and longest_s > allowed_s:
        table.fault(
            "inference_timeout",
            f"with connect_timeout it comes to {longest_s:g}s, "
            f"over the {allowed_s:g}s of [server] request_timeout",
            "shorten it or raise request_timeout",
        )


def _refuse_doors(server: Table) -> None:
    """Who believes that keys are asked for must not find out otherwise later."""
    for key in ("tls", "auth"):
        if server.given(key):
            server.fault(
                key,
                "has no effect with [extproc] listen: clients talk to another Envoy",
                "remove it, and set it up there",
            )


def _refuse_keys(table: Table) -> None:
    # Whoever reaches the port could ask for it.
    for key in ("api_key_env", "api_key_file"):
        if table.given(key):
            table.fault(
                key,
                "has no effect with [extproc] listen: the sidecar hands no key to another Envoy",
                "remove it, and let that Envoy set the header",
            )


def _check_key_and_ca(table: Table, upstream: Upstream) -> None:
    if table.given("api_key_env") and table.given("api_key_file"):
        table.fault("api_key_file", "stands beside api_key_env", "keep one of the two")
    if table.given("ca_file") and table.fit("base_url") and not upstream.tls:
        mend = "write base_url with https, or remove ca_file"
        table.fault("ca_file", "has no use: base_url is plain http", mend)


def _check_files(document: Document, config: Config, files: Files) -> None:
    """What stands in the files, as far as their paths are fit."""
    tables = {table.path: table for table in document.tables}

    def check(at: tuple[str, ...], key: str, file: str | None, judge: f.Judge) -> bool:
        """Whether the file was read, and is fit."""
        table = tables.get(at)
        if not file or table is None or not table.fit(key):
            return False
        try:
            warning = judge(file)
        except v.Unfit as unfit:
            for each in unfit.each:
                table.fault(key, each.problem, each.mend)
            return False
        except OSError as error:
            problem = f"{quoted(file)} cannot be read: {error.strerror}"
            if files.insist:
                table.fault(key, problem, "check the path, its rights, and what is mounted")
            else:
                files.warn(table.noted(key, problem, "what is in it was not checked"))
            return False
        if warning is not None:
            files.warn(table.noted(key, warning.problem, warning.mend))
        return True

    foreign_tls = config.foreign.tls if config.foreign is not None else None
    for parent, tls in (("server", config.server.tls), ("extproc", foreign_tls)):
        if tls is None:
            continue
        at: tuple[str, ...] = (parent, "tls")
        cert, key = tls.cert_file, tls.key_file
        has_cert = check(at, "cert_file", cert, f.certificates)
        if check(at, "key_file", key, f.private_key_of(cert) if has_cert else f.private_key):
            _ = has_cert and check(at, "cert_file", cert, f.lifetime_with(key, files.now_s))
        check(at, "client_ca_file", tls.client_ca_file, f.authorities_at(files.now_s))
    if (auth := config.server.auth) is not None:
        check(("server", "auth"), "keys_file", auth.keys_file, f.holds_client_keys)
    for id_, upstream in config.upstreams.items():
        at = ("upstream", id_)
        check(at, "api_key_file", upstream.api_key_file, f.holds_a_key)
        check(at, "ca_file", upstream.ca_file, f.authorities_at(files.now_s))


def _check_secrets(
    document: Document, config: Config, environ: Mapping[str, str], files: Files | None
) -> None:
    """What stands in the variables, as far as their names are fit."""
    tables = {table.path: table for table in document.tables}

    def check(at: tuple[str, ...], variable: str | None) -> None:
        table = tables.get(at)
        if variable is None or table is None or not table.fit("api_key_env"):
            return
        try:
            is_set = v.env_secret(variable, environ) is not None
        except v.Unfit as unfit:
            table.fault("api_key_env", unfit.problem, unfit.mend)
            return
        problem = f"the environment variable {variable} is not set"
        if not is_set and (files is None or files.insist):
            mend = f"export {variable}, or remove api_key_env if the provider needs no key"
            table.fault("api_key_env", problem, mend)
        elif not is_set and files is not None:
            files.warn(table.noted("api_key_env", problem, "the gateway does not start without it"))

    for id_, upstream in config.upstreams.items():
        check(("upstream", id_), upstream.api_key_env)
    check(("router", "encoder"), config.router.encoder.api_key_env)


def _routes(root: Table, upstreams: Mapping[str, Upstream]) -> tuple[Route, ...]:
    reference = _reference(upstreams)
    names: dict[str, str] = {}
    utterances: dict[str, str] = {}
    keywords: dict[str, str] = {}
    patterns: dict[str, str] = {}
    headers: dict[str, str] = {}
    contents: dict[str, str] = {}

    def read(table: Table) -> Route:
        name = v.unclaimed(v.name(EXPLICIT_ROUTE, RULE), names, "the name of another route")
        own = table.raw("name")
        route = f"of route {quoted(own)}" if isinstance(own, str) else "of a route without a name"
        utterance = v.unclaimed(v.text, utterances, f"an utterance {route}", key=v.folded)
        keyword = v.unclaimed(v.text, keywords, f"a keyword {route}", key=v.folded)
        pattern = v.unclaimed(v.pattern, patterns, f"a pattern {route}")
        header = v.headers(headers, f"a header {route}")
        content = v.unclaimed(v.choice(Content), contents, f"a content {route}")
        chain = v.unclaimed(reference, {}, "in this chain")
        chosen = Route(
            name=table.need("name", name, "", mend='add name = "..."'),
            upstreams=table.many("upstreams", chain, ()),
            threshold=table.get("threshold", v.fraction, None),
            utterances=table.many("utterances", utterance, ()),
            keywords=table.many("keywords", keyword, ()),
            patterns=table.many("patterns", pattern, ()),
            headers=table.get("headers", header, ()),
            has=table.many("has", content, ()),
            min_chars=table.get("min_chars", v.integer(1), None),
            max_chars=table.get("max_chars", v.integer(1), None),
            priority=table.get("priority", v.integer(0, 1000), 0),
        )
        if not chosen.upstreams and table.fit("upstreams"):
            table.fault(
                "upstreams", "names no upstream", "name at least one: the first is tried first"
            )
        _check_rules(table, chosen)
        return chosen

    return tuple(read(table) for table in root.items("route"))


def _check_rules(table: Table, route: Route) -> None:
    if route.min_chars and route.max_chars and route.max_chars < route.min_chars:
        problem = f"max_chars ({route.max_chars}) is under min_chars ({route.min_chars})"
        table.fault("max_chars", problem, "raise max_chars or lower min_chars")
    rules = ("headers", "has", "min_chars", "max_chars", "keywords", "patterns")
    if route.priority and not any(table.given(key) for key in rules):
        problem = "has nothing to order: among utterances the best score decides"
        table.fault(
            "priority", problem, f"remove it, or add {', '.join(rules[:-1])} or {rules[-1]}"
        )


def _reference(upstreams: Mapping[str, Upstream]) -> v.Reader[str]:
    ids = {upstream.name: id_ for id_, upstream in upstreams.items()}

    def read(value: object) -> str:
        chosen = v.text(value)
        if chosen in upstreams:
            return chosen
        if chosen in ids:
            raise v.Unfit(
                f"{quoted(chosen)} is the name of an upstream, not its id",
                f"write {quoted(ids[chosen])}",
            )
        raise v.Unfit(
            f"there is no upstream {quoted(chosen)}",
            v.did_you_mean(chosen, upstreams).strip() or f"add {_label(chosen)}",
        )

    return read


def _router(root: Table, upstreams: Mapping[str, Upstream], routes: Iterable[Route]) -> Router:
    table, default = root.child("router"), _DEFAULT.router
    encoder = table.child("encoder")
    router = Router(
        default=_default_route(root, table, routes),
        deadline_s=table.get("deadline", v.duration, default.deadline_s),
        workers=table.get("workers", v.integer(0, 1024), default.workers),
        queue=table.get("queue", v.integer(1), default.queue),
        cascade=table.get("cascade", v.switch, default.cascade),
        cache=table.get("cache", v.integer(0), default.cache),
        aliases=_aliases(table, upstreams),
        unknown_model=table.get("unknown_model", v.choice(UnknownModel), default.unknown_model),
        encoder=_encoder(encoder),
    )
    _check_encoder(encoder, table, router)
    return router


def _encoder(table: Table) -> Encoder:
    default = _DEFAULT.router.encoder
    return Encoder(
        path=table.get("path", v.text, default.path),
        url=table.get("url", v.embeddings_url, default.url),
        model=table.get("model", v.text, default.model),
        api_key_env=table.get("api_key_env", v.env_name, default.api_key_env),
        dimensions=table.get("dimensions", v.integer(1, 65_536), default.dimensions),
        deadline_s=table.get("deadline", v.duration, default.deadline_s),
        batch_tokens=table.get("batch_tokens", v.integer(1), default.batch_tokens),
        max_batch=table.get("max_batch", v.integer(1, 256), default.max_batch),
        max_concurrency=table.get("max_concurrency", v.integer(1, 1024), default.max_concurrency),
    )


def _check_encoder(table: Table, router_table: Table, router: Router) -> None:
    encoder = router.encoder
    if table.given("path") and table.given("url"):
        problem = "is given beside path, and there is one encoder"
        mend = "keep url for an embeddings service, or path for a model that the sidecar runs"
        table.fault("url", problem, mend)
    elif not table.given("url"):
        for key in table.asked:
            if key != "path" and table.given(key):
                problem = "is of an embeddings service, and there is no url"
                table.fault(key, problem, "add url, or remove it")
    if (
        table.given("url")
        and encoder.deadline_s >= router.deadline_s
        and (table.fit("deadline") and router_table.fit("deadline"))
    ):
        default = "" if table.given("deadline") else ", its default,"
        table.fault(
            "deadline",
            f"{encoder.deadline_s:g}s{default} is not under the {router.deadline_s:g}s of "
            "[router] deadline, within which the prompt waits its turn and the call is made",
            "shorten it, or raise [router] deadline",
        )


def _default_route(root: Table, table: Table, routes: Iterable[Route]) -> str:
    chosen = table.get("default", v.text, _ONLY_ROUTE)
    names = [route.name for route in routes if route.name]
    if not root.raw("route"):
        names = [_ONLY_ROUTE]
    if chosen in names or not names or not table.fit("default") or not root.fit("route"):
        return chosen
    # A route whose name was refused may well be the one that is meant, and so may one without a name.
    if not {chosen, None}.isdisjoint(_raw_names(root)):
        return chosen
    listed = f"set it to {'one of ' if len(names) > 1 else ''}{', '.join(names)}"
    if table.given("default"):
        mend = v.did_you_mean(chosen, names) + listed
        table.fault("default", f"there is no route {quoted(chosen)}", mend)
    else:
        at = None if root.given("router") else ("route", 0)
        table.fault("default", "is missing, and no route is called default", listed, at=at)
    return chosen


def _raw_names(root: Table) -> Iterable[str | None]:
    """Of the routes, as they stand in the file."""
    raw = root.raw("route")
    for each in raw if isinstance(raw, list) else ():
        name = each.get("name") if isinstance(each, dict) else None
        yield name if isinstance(name, str) else None


def _aliases(table: Table, upstreams: Mapping[str, Upstream]) -> tuple[str, ...]:
    default = _DEFAULT.router.aliases
    claims: dict[str, str] = {}
    for id_, upstream in upstreams.items():
        for role, own in (("id", id_), ("name", upstream.name), ("model", upstream.model)):
            if own in claims:
                continue
            claims[own] = f"the {role} of {_label(id_)}"
            if own in default and not table.given("aliases"):
                problem = f"{quoted(own)} is an alias by default, and {claims[own]}"
                mend = "rename the upstream, or set [router] aliases"
                table.fault("aliases", problem, mend, at=("upstream", id_, role))
    return table.many("aliases", v.unclaimed(v.text, claims, "an alias"), default)


def _circuit(table: Table) -> CircuitPolicy:
    default = _DEFAULT.circuit
    counted = table.many("counted_errors", v.choice(COUNTABLE), tuple(default.counted_errors))
    if not counted and table.fit("counted_errors"):
        mend = f"list at least one of {', '.join(COUNTABLE)}"
        table.fault("counted_errors", "is empty, so that the circuit would never open", mend)
    return CircuitPolicy(
        failure_threshold=table.get("failure_threshold", v.integer(1), default.failure_threshold),
        window_s=table.get("window", v.duration, default.window_s),
        cooldown_s=table.get("cooldown", v.duration, default.cooldown_s),
        half_open_max_requests=table.get(
            "half_open_max_requests", v.integer(1), default.half_open_max_requests
        ),
        counted_errors=frozenset(counted),
    )


def _fallback(table: Table) -> Fallback:
    default = _DEFAULT.fallback
    return Fallback(
        mode=table.get("mode", v.choice(FallbackMode), default.mode),
        rule_response=table.get("rule_response", v.text, default.rule_response),
        metric_prefix=table.get("metric_prefix", v.metric_name, default.metric_prefix),
    )


def _retry(table: Table) -> Retry:
    default = _DEFAULT.retry
    retry = Retry(
        max_retries=table.get("max_retries", v.integer(0, 10), default.max_retries),
        base_s=table.get("base", v.duration, default.base_s),
        max_s=table.get("max", v.duration, default.max_s),
    )
    if retry.max_s < retry.base_s and table.fit("max") and table.fit("base"):
        problem = f"max ({retry.max_s:g}s) is under base ({retry.base_s:g}s)"
        table.fault("max" if table.given("max") else "base", problem, "raise max or lower base")
    return retry


def _log(table: Table) -> Log:
    default = _DEFAULT.log
    return Log(
        access=table.get("access", v.log_target, default.access),
        format=table.get("format", v.choice(LogFormat), default.format),
        level=table.get("level", v.choice(LogLevel), default.level),
    )


def _tracing(table: Table) -> Tracing:
    default = _DEFAULT.tracing
    return Tracing(
        endpoint=table.get("endpoint", v.collector, default.endpoint),
        sampling=table.get("sampling", v.fraction, default.sampling),
    )
