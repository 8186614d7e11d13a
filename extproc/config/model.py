"""The validated configuration as frozen values, and the chains that follow from it; it reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from urllib.parse import SplitResult, urlsplit

from extproc.core.circuit import CircuitPolicy
from extproc.core.errors import Content

AUTO_ALIASES = ("auto",)
DEFAULT_SOCKET = "/run/pointsman/extproc.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP listening address; `host` is an IP literal without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reachable(self) -> Address:
        """Where this machine reaches the listener; a wildcard is reached on loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return Address(host, self.port)

    @property
    def url(self) -> str:
        """The same as a URL without a path."""
        return f"http://{self.reachable}"


class TlsVersion(StrEnum):
    """As Envoy calls them."""

    V1_2 = "TLSv1_2"
    V1_3 = "TLSv1_3"


@dataclass(frozen=True, slots=True)
class Tls:
    """The listener's own certificate; files are PEM, and Envoy reads them again when they change."""

    cert_file: str
    """The certificate, then those between it and its root."""
    key_file: str
    client_ca_file: str | None = None
    """Who signs clients' certificates; None: clients need none."""
    min_version: TlsVersion = TlsVersion.V1_2


@dataclass(frozen=True, slots=True)
class Auth:
    """Clients must show a key."""

    keys_file: str
    """A line for each key: the client's id, and the key."""


@dataclass(frozen=True, slots=True)
class Server:
    """The client-facing listener."""

    listen: Address = Address("0.0.0.0", 8080)  # noqa: S104  a gateway is meant to be reached
    read_timeout_s: float = 10.0
    """Time to receive the whole request."""
    write_timeout_s: float = 30.0
    """Longest silence between two chunks of a response."""
    request_timeout_s: float | None = None
    """Limit on the whole exchange; None: no limit, long streams live."""
    max_body_bytes: int = 10 * 1024 * 1024
    tls: Tls | None = None
    auth: Auth | None = None

    @property
    def url(self) -> str:
        """How this machine reaches the listener."""
        return f"https://{self.listen.reachable}" if self.tls else self.listen.url


@dataclass(frozen=True, slots=True)
class Upstream:
    """One provider: a base URL, a model name and the time it may take."""

    id: str
    name: str
    base_url: str
    model: str
    api_key_env: str | None = None
    api_key_file: str | None = None
    """The key alone; read again when it changes. Never beside api_key_env."""
    ca_file: str | None = None
    """PEM of the CAs that may have signed its certificate; None: the system's."""
    inference_timeout_s: float = 30.0
    """Time to response headers."""
    connect_timeout_s: float = 2.0
    first_token_timeout_s: float | None = None
    """From a stream's headers to its first chunk; None: not watched. Watching costs the sidecar two
    messages a stream."""
    max_concurrent_requests: int = 1024
    """Beyond it, an attempt ends at once as `overflow` and the next upstream answers."""

    @property
    def url(self) -> SplitResult:
        return urlsplit(self.base_url)

    @property
    def has_key(self) -> bool:
        """Whether requests get a key of ours."""
        return self.api_key_env is not None or self.api_key_file is not None

    @property
    def host(self) -> str:
        return self.url.hostname or ""

    @property
    def port(self) -> int:
        return self.url.port or (443 if self.tls else 80)

    @property
    def tls(self) -> bool:
        return self.url.scheme == "https"

    @property
    def path(self) -> str:
        """The path of `base_url` without a trailing slash; empty when there is none."""
        return self.url.path.rstrip("/")


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries on the same upstream; going to another upstream never waits."""

    max_retries: int = 1
    base_s: float = 0.2
    max_s: float = 1.0


RETRY_AFTER_CAP_S = 3.0
"""A Retry-After beyond it is not waited for: the next upstream answers sooner."""


class FallbackMode(StrEnum):
    MODEL_THEN_RULE = "model_then_rule"
    MODEL_ONLY = "model_only"
    RULE_ONLY = "rule_only"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Fallback:
    """What happens when an upstream cannot answer."""

    mode: FallbackMode = FallbackMode.MODEL_THEN_RULE
    rule_response: str = "The service is busy. Please try again in a moment."
    metric_prefix: str = "model_fallback_total"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ACCESS_OFF = "off"
ACCESS_STDOUT = "stdout"


@dataclass(frozen=True, slots=True)
class Log:
    """Envoy's access log, and how the sidecar writes its own."""

    access: str = ACCESS_OFF
    """`off`, `stdout` (Envoy's), or an absolute path that Envoy appends to."""
    format: LogFormat = LogFormat.TEXT
    level: LogLevel = LogLevel.INFO


@dataclass(frozen=True, slots=True)
class Tracing:
    """Where spans go; `endpoint` None: there are none, and nothing is paid for them."""

    endpoint: str | None = None
    """`http://HOST:PORT` of an OTLP receiver that speaks gRPC."""
    sampling: float = 1.0
    """Share of the traces that begin here, in [0, 1]; a caller's own decision is kept."""


@dataclass(frozen=True, slots=True)
class ExtprocTls:
    """Paths of PEM files; `client_ca_file` None: whoever reaches the port is served."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """The sidecar on TCP, for an Envoy that is not ours."""

    listen: Address
    tls: ExtprocTls | None = None
    settle_s: float = 5.0
    """After the signal to end: how long it goes on accepting, and says that it will not."""


SERVE_ONLY = (
    "[extproc] listen is for an Envoy that is there already: use pointsman serve, or remove the key"
)
"""Why there is nothing to render and no Envoy to start."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Which embedding model to run, here (`path`) or elsewhere (`url`), never both.

    Neither: the default model, built once into the cache. The rest is of the service at `url`.
    """

    path: str | None = None
    url: str | None = None
    """The whole address, as in http://tei:8080/v1/embeddings."""
    model: str | None = None
    """What a request names; None: nothing."""
    api_key_env: str | None = None
    dimensions: int | None = None
    """What a request asks vectors to have; None: as many as the model gives."""
    deadline_s: float = 0.1
    """Of one call, connecting included."""
    batch_tokens: int = 16_384
    """Estimated, in one call."""
    max_batch: int = 32
    """Texts in one call; a long prompt is two."""
    max_concurrency: int = 2
    """Calls in flight. With 4, calls were half as full, and the loop's time for a prompt grew by a third."""


class UnknownModel(StrEnum):
    ERROR = "error"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Router:
    """How a request without an explicit model is decided."""

    default: str
    deadline_s: float = 0.15
    workers: int = 0
    """0: one per core, less one for Envoy and the event loop, at least one."""
    queue: int = 1024
    cascade: bool = False
    """Whether the static encoder alone decides where its margin is decisive."""
    cache: int = 4096
    """Decisions to remember; 0: none."""
    aliases: tuple[str, ...] = AUTO_ALIASES
    unknown_model: UnknownModel = UnknownModel.ERROR
    encoder: Encoder = Encoder()


@dataclass(frozen=True, slots=True)
class Route:
    """One destination: the signals that admit a prompt, and the upstreams that serve it in order."""

    name: str
    upstreams: tuple[str, ...]
    threshold: float | None = None
    """Score in [0, 1] from which the semantic signal admits; None: by the number of utterances."""
    utterances: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    """Request headers, lower-case name and value; the value `*` stands for any."""
    has: tuple[Content, ...] = ()
    min_chars: int | None = None
    max_chars: int | None = None
    """Characters of text in the whole request."""
    priority: int = 0
    """Of the rules; higher ones are asked first."""

    @property
    def has_rules(self) -> bool:
        """Whether it has a signal that decides without the embedding model."""
        lengths = (self.min_chars, self.max_chars)
        return bool(self.keywords or self.patterns or self.headers or self.has) or any(lengths)


@dataclass(frozen=True, slots=True)
class Chain:
    """Upstream ids in the order they are tried; `rule`: the canned answer stands at the end."""

    name: str
    upstreams: tuple[str, ...]
    rule: bool


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that one TOML file says. `upstreams` keeps the order of the file."""

    upstreams: Mapping[str, Upstream]
    routes: tuple[Route, ...]
    """Never empty: a file without routes gets one named `default`, over all upstreams."""
    router: Router
    server: Server = Server()
    admin: Address = Address("127.0.0.1", 9901)
    metrics: Address = Address("127.0.0.1", 9464)
    envoy_metrics: Address | None = None
    """Where Envoy serves its own /stats/prometheus, and nothing else of its admin; None: nowhere."""
    health: Address | None = None
    """Where /healthz and /readyz answer besides `metrics`, and nothing else does; None: nowhere."""
    extproc_socket: str = DEFAULT_SOCKET
    foreign: Foreign | None = None
    """None: the sidecar serves our own Envoy, on `extproc_socket`."""
    circuit: CircuitPolicy = field(default_factory=CircuitPolicy)
    fallback: Fallback = Fallback()
    retry: Retry = Retry()
    log: Log = Log()
    tracing: Tracing = Tracing()

    @property
    def run_dir(self) -> str:
        """Where the socket is, and the files that Envoy reads beside its bootstrap."""
        return str(PurePath(self.extproc_socket).parent)

    def route(self, name: str) -> Route:
        return next(route for route in self.routes if route.name == name)

    def visit_limit_s(self, upstream: Upstream) -> float:
        """Longest time that a visit to an upstream takes to answer with headers, retries included."""
        retries = self.retry.max_retries
        wait_s = max(self.retry.max_s, RETRY_AFTER_CAP_S)
        return (retries + 1) * upstream.inference_timeout_s + retries * wait_s

    def chains(self) -> tuple[Chain, ...]:
        """Every chain that a request can take: one per route, then one per upstream named explicitly.

        An explicit upstream is followed by those that stand behind it in the route where most do
        (the default route, where several have as many): a client that names a model still gets an
        answer.
        """
        chains = [self._chain(route_chain(route.name), route.upstreams) for route in self.routes]
        by_preference = sorted(self.routes, key=lambda route: route.name != self.router.default)
        for upstream in self.upstreams:
            tails = [
                route.upstreams[route.upstreams.index(upstream) :]
                for route in by_preference
                if upstream in route.upstreams
            ]
            longest = max(tails, key=len, default=(upstream,))
            chains.append(self._chain(upstream_chain(upstream), longest))
        return tuple(chains)

    def _chain(self, name: str, upstreams: tuple[str, ...]) -> Chain:
        mode = self.fallback.mode
        only_first = mode in (FallbackMode.RULE_ONLY, FallbackMode.NONE)
        rule = mode in (FallbackMode.RULE_ONLY, FallbackMode.MODEL_THEN_RULE)
        return Chain(name, upstreams[:1] if only_first else upstreams, rule)


def route_chain(route: str) -> str:
    """The value of `x-pointsman-chain` for a route."""
    return f"route.{route}"


def upstream_chain(upstream: str) -> str:
    """The value of `x-pointsman-chain` for an explicit upstream id."""
    return f"upstream.{upstream}"
