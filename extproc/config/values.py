"""Readers from one TOML value to a typed one; they know no key and no table.

A reader raises `Unfit` with what is wrong and how to mend it. A value that may hold a secret pasted
in the wrong place (env names, URLs) is never repeated there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address, ip_address
from typing import Final, TypeVar

from extproc.config.faults import nearest, quoted
from extproc.config.model import ACCESS_OFF, ACCESS_STDOUT, Address
from extproc.core.patterns import PatternError, compile_pattern

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
S = TypeVar("S", bound=str)
Reader = Callable[[object], T]

MAX_COUNT: Final = 1_000_000
"""Counts end up in Envoy's uint32 and in queues that must fit in memory."""
_MAX_SOCKET_BYTES: Final = 100
"""sun_path holds 107 bytes and a NUL; gRPC and Envoy each want a little of it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# What keys of providers begin with, or twenty letters and digits on end with both kinds among them.
_SECRET = re.compile(
    r"sk-|AIza|eyJ|Bearer\b|.*(?=[A-Za-z0-9]*[a-z])(?=[A-Za-z0-9]*[0-9])[A-Za-z0-9]{20}", re.DOTALL
)
_KEY = re.compile(r"[!-~]+")
_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_STRIPPED = ("x-pointsman-", "x-envoy-")
_SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "x-api-key", "api-key")
_METRIC_NAME = re.compile(r"(?!_total$)[A-Za-z_:][A-Za-z0-9_:]*")  # `_total` is only ever added
_OWN_METRICS = ("pointsman_", "process_")
_MODEL = re.compile(r"[!#-\[\]-~]+")
# Labels of 1 to 63 characters, RFC 1035: with others a resolver does not even ask.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.*[A-Za-z])(?!.{{255}}){_LABEL}(?:\.{_LABEL})*\.?")
_AUTHORITY = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::([0-9]{1,5}))?")
_URL_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_QUANTITY = re.compile(r"(-?)([0-9]{1,15}(?:\.[0-9]{1,9})?)([A-Za-z]*)")


_KINDS: Final[Mapping[type, str]] = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
}


class Unfit(Exception):  # noqa: N818  it judges a value; of a file read again, others see it too
    """A value that its key cannot take, or a file that cannot serve. `each`: this, and what else is wrong
    with it.
    """

    def __init__(self, problem: str, mend: str, *others: Unfit) -> None:
        super().__init__(problem)
        self.problem = problem
        self.mend = mend
        self.each: tuple[Unfit, ...] = (self, *others)

    @classmethod
    def of(cls, found: Sequence[Unfit]) -> Unfit:
        """All of `found`, which are some, as one."""
        first, *others = found
        return cls(first.problem, first.mend, *others)


def kind(value: object) -> str:
    """The TOML type of a value, with its article."""
    return _KINDS.get(type(value), "a date or time")


def _string(value: object, mend: str) -> str:
    if not isinstance(value, str):
        raise Unfit(f"is {kind(value)}, not a string", mend)
    if not value.strip():
        raise Unfit("is an empty string", mend)
    return value


def text(value: object) -> str:
    """A string that is not blank."""
    return _string(value, "write some text in double quotes")


@dataclass(frozen=True, slots=True)
class _Quantity:
    noun: str
    units: Mapping[str, int]
    example: str
    most: str
    most_amount: int

    @property
    def mend(self) -> str:
        *units, last = self.units
        return (
            f'write a number with a unit ({", ".join(units)} or {last}), such as "{self.example}"'
        )

    def read(self, value: object, *, zero: bool = False) -> float:
        """In the smallest unit, at least one of it: to Envoy, less than 1 ms is no limit at all."""
        if not isinstance(value, str):
            raise Unfit(f"is {kind(value)}, not a {self.noun}", self.mend)
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise Unfit(f"{quoted(value)} is not a {self.noun}", self.mend)
        sign, number, unit = match.groups()
        if not unit:
            raise Unfit(f"{quoted(value)} has no unit", self.mend)
        if unit not in self.units:
            raise Unfit(f"{quoted(value)} has the unknown unit {quoted(unit)}", self.mend)
        amount = float(number) * self.units[unit]
        least = f"{0 if zero else 1}{next(iter(self.units))}"
        if sign:
            raise Unfit(f"{quoted(value)} is negative", f'write at least "{least}"')
        if amount == 0 and not zero:
            raise Unfit(f"{quoted(value)} is zero", f'write at least "{least}"')
        if 0 < amount < 1:
            raise Unfit(f"{quoted(value)} is too small", f'write at least "{least}"')
        if amount > self.most_amount:
            raise Unfit(f"{quoted(value)} is too large", f'write at most "{self.most}"')
        return amount


_DURATION = _Quantity(
    "duration",
    {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000},
    example="10s",
    most="24h",
    most_amount=24 * 3_600_000,
)
_SIZE = _Quantity(
    "size",
    {"B": 1, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30},
    example="10MiB",
    most="1GiB",
    most_amount=2**30,
)


def duration(value: object) -> float:
    """Seconds, more than 0."""
    return _DURATION.read(value) / 1000


def limit(value: object) -> float | None:
    """Seconds, or None for zero: no limit."""
    return _DURATION.read(value, zero=True) / 1000 or None


def size(value: object) -> int:
    """Bytes, at least 1."""
    return int(_SIZE.read(value))


def integer(low: int, high: int = MAX_COUNT) -> Reader[int]:
    """A whole number in [low, high]."""
    mend = f"write a whole number from {low} to {high}"

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Unfit(f"is {kind(value)}, not an integer", mend)
        if not low <= value <= high:
            # A hexadecimal integer may have more digits than Python agrees to print.
            shown = f"{value} is" if abs(value) < 10**15 else "is"
            raise Unfit(f"{shown} out of range", mend)
        return value

    return read


def fraction(value: object) -> float:
    """A number in [0, 1]."""
    mend = "write a number from 0 to 1, such as 0.42"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit(f"is {kind(value)}, not a number", mend)
    if not 0 <= value <= 1:
        shown = f"{value:g} is" if isinstance(value, float) or abs(value) < 10**15 else "is"
        raise Unfit(f"{shown} outside [0, 1]", mend)
    return float(value)


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise Unfit(f"is {kind(value)}, not a boolean", "write true or false, without quotes")
    return value


def choice(allowed: Iterable[E]) -> Reader[E]:
    """One of a closed set."""
    known = {str(member): member for member in allowed}

    def read(value: object) -> E:
        mend = f"write one of {', '.join(known)}"
        if not isinstance(value, str):
            raise Unfit(f"is {kind(value)}, not a string", mend)
        if value not in known:
            raise Unfit(f"{quoted(value)} is not known here", f"{did_you_mean(value, known)}{mend}")
        return known[value]

    return read


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that opens a mend, or nothing."""
    near = nearest(word, known)
    return f"did you mean {quoted(near)}? " if near else ""


def name(*reserved: str) -> Reader[str]:
    """A name that becomes a header value, a metric label and part of a cluster name."""
    mend = 'use up to 100 letters, digits, ".", "_" and "-", beginning with a letter or digit'

    def read(value: object) -> str:
        chosen = _string(value, mend)
        if not _NAME.fullmatch(chosen):
            raise Unfit(f"{quoted(chosen)} is not a valid name", mend)
        if chosen in reserved:
            raise Unfit(f"{quoted(chosen)} is reserved", "choose another name")
        return chosen

    return read


def model(value: object) -> str:
    """A provider's model name; it becomes a header value."""
    mend = "write it as the provider does, in visible ASCII without quotes or backslashes"
    chosen = _string(value, mend)
    if not _MODEL.fullmatch(chosen):
        raise Unfit(f"{quoted(chosen)} cannot stand in a header", mend)
    return chosen


def folded(phrase: str) -> str:
    """Phrases that differ in case or outer space only are one."""
    return phrase.strip().casefold()


def unclaimed(
    read: Reader[S], claims: dict[str, str], claim: str, *, key: Callable[[str], str] = str
) -> Reader[S]:
    """A string that is nothing else yet. `claims` says what others are, and learns of this one."""

    def read_unclaimed(value: object) -> S:
        chosen = read(value)
        if key(chosen) in claims:
            problem = f"{quoted(chosen)} is already {claims[key(chosen)]}"
            raise Unfit(problem, "keep it in one place")
        claims[key(chosen)] = claim
        return chosen

    return read_unclaimed


def pattern(value: object) -> str:
    """A regular expression in RE2's syntax."""
    expression = _string(value, "write a regular expression in quotes, best in single ones")
    try:
        compile_pattern(expression)
    except PatternError as error:
        raise Unfit(f"{quoted(expression)} {error.problem}", error.mend) from None
    return expression


def headers(claims: dict[str, str], claim: str) -> Reader[tuple[tuple[str, str], ...]]:
    """Request headers, lower-case names and values; of `claims`, see `unclaimed`.

    Values are not repeated: they may hold secrets.
    """
    mend = 'write a table of names and values, such as { "x-team" = "data", "x-tier" = "*" }'

    def read(value: object) -> tuple[tuple[str, str], ...]:
        if not isinstance(value, dict):
            raise Unfit(f"is {kind(value)}, not a table", mend)
        pairs, found = [], []
        for name, each in value.items():
            try:
                pairs.append(pair(name, each))
            except Unfit as unfit:
                found.append(unfit)
        if found:
            raise Unfit.of(found)
        return tuple(pairs)

    def pair(name: str, value: object) -> tuple[str, str]:
        lower = _header_name(name)
        if not isinstance(value, str):
            problem = f"{quoted(lower)} is {kind(value)}, not a string"
            raise Unfit(problem, 'write its value, or "*" for any')
        if not _HEADER_VALUE.fullmatch(value):
            raise Unfit(
                f"{quoted(lower)} has a value that no header can have",
                "write visible ASCII, with spaces inside it only",
            )
        line = f"{lower}: {value}"
        if line in claims:
            problem = f"{quoted(lower)} with this value is already {claims[line]}"
            raise Unfit(problem, "keep it in one place")
        claims[line] = claim
        return lower, value

    return read


def _header_name(name: str) -> str:
    lower = name.lower()
    if not _HEADER_NAME.fullmatch(lower):
        raise Unfit(f"{quoted(name)} is not a header's name", "write one such as x-team")
    if lower.startswith(_STRIPPED):
        raise Unfit(
            f"{quoted(name)} is removed from every request before it is read",
            "choose a name that does not begin with x-pointsman- or x-envoy-",
        )
    if lower in _SECRET_HEADERS:
        raise Unfit(
            f"{quoted(name)} holds a secret", "have the proxy in front set a header that tells who"
        )
    return lower


def env_name(value: object) -> str:
    """The name of an environment variable; a secret in its place is refused and never repeated."""
    mend = 'write the NAME of an environment variable that holds the key, such as "PRIMARY_API_KEY"'
    chosen = _string(value, mend)
    if _SECRET.match(chosen[:200]):
        raise Unfit("looks like a key, not like a name", f"{mend}, and treat this key as leaked")
    if not _ENV_NAME.fullmatch(chosen):
        raise Unfit("is not a legal variable name", mend)
    return chosen


def secret(text: str, holder: str) -> str:
    """A key that becomes a header's value. It is never repeated; its `holder` is named."""
    if not text.strip():
        raise Unfit(f"{holder} is {'blank' if text else 'empty'}", "put the key into it")
    if not _KEY.fullmatch(text):
        raise Unfit(
            f"{holder} holds spaces, line breaks, control characters or non-ASCII",
            "put the key alone into it: it becomes a header",
        )
    return text


def env_secret(variable: str, environ: Mapping[str, str]) -> str | None:
    """The key in an environment variable; None: there is no such variable."""
    text = environ.get(variable)
    return None if text is None else secret(text, f"the environment variable {variable}")


def metric_name(value: object) -> str:
    """A Prometheus metric name outside the gateway's own."""
    mend = 'use letters, digits, "_" and ":", not beginning with a digit'
    chosen = _string(value, mend)
    if not _METRIC_NAME.fullmatch(chosen):
        raise Unfit(f"{quoted(chosen)} is not a Prometheus metric name", mend)
    if chosen.startswith(_OWN_METRICS):
        raise Unfit(
            f"{quoted(chosen)} is in the space of the gateway's own metrics",
            "begin it with another word",
        )
    return chosen


def socket_path(value: object) -> str:
    """The path of a Unix socket, as Envoy and gRPC both understand it."""
    mend = 'write a plain path, such as "/run/pointsman/extproc.sock"'
    path = _string(value, mend)
    if path.startswith(("@", "unix:")) or not path.isprintable():
        raise Unfit(f"{quoted(path)} is not a plain path", mend)
    length = len(path.encode())
    if length > _MAX_SOCKET_BYTES:
        raise Unfit(
            f"is {length} bytes long", f"shorten it to {_MAX_SOCKET_BYTES}: Unix allows no more"
        )
    return path


def file_path(value: object) -> str:
    """The absolute path of a file that Envoy reads, or the sidecar."""
    mend = 'write a path that begins with "/"'
    path = _string(value, mend)
    if not (path.startswith("/") and path.isprintable()):
        raise Unfit(f"{quoted(path)} is not an absolute path", mend)
    return path


def log_target(value: object) -> str:
    """`off`, `stdout`, or the absolute path of a file that Envoy appends to."""
    mend = 'write "off", "stdout", or a path that begins with "/"'
    target = _string(value, mend)
    if target not in (ACCESS_OFF, ACCESS_STDOUT) and not (
        target.startswith("/") and target.isprintable()
    ):
        raise Unfit(f"{quoted(target)} is neither a switch nor an absolute path", mend)
    return target


def collector(value: object) -> str:
    """`http://HOST:PORT` of an OTLP receiver; TLS to one further away is its local agent's matter."""
    mend = 'write "http://HOST:PORT" of an OTLP receiver that speaks gRPC, usually on port 4317'
    url = base_url(value).rstrip("/")
    scheme, _, authority = url.partition("://")
    if scheme.lower() != "http":
        raise Unfit("is not plain http", mend)
    if "/" in authority or not re.search(r":[0-9]+$", authority):
        raise Unfit("has a path, or no port", mend)
    return url


def embeddings_url(value: object) -> str:
    """The whole address of an OpenAI-compatible embeddings service."""
    url = base_url(value)
    if not url.partition("://")[2].partition("/")[2]:
        raise Unfit(
            "has no path", 'write all of it, such as "http://embeddings.example:8080/v1/embeddings"'
        )
    return url


def address(value: object) -> Address:
    """`HOST:PORT`, the host being an IP literal, `localhost`, or nothing for every interface."""
    mend = (
        'write an IP address and a port, such as "127.0.0.1:8080", or ":8080" for every interface'
    )
    listen = _string(value, mend)
    if re.fullmatch(r"[0-9]+", listen):
        raise Unfit(
            f"{quoted(listen)} has no host", f"write {quoted(':' + listen)}, for every interface"
        )
    if listen.count(":") > 1 and not listen.startswith("["):
        raise Unfit(
            f"{quoted(listen)} is ambiguous", 'put an IPv6 address in brackets: "[::1]:8080"'
        )
    match = re.fullmatch(r"(\[[^\[\]]*\]|[^:]*)(:.*)?", listen, re.DOTALL)
    host, port = match.groups() if match else (listen, None)
    if port is None or port == ":":
        raise Unfit(f"{quoted(listen)} has no port", mend)
    if not re.fullmatch(r":[0-9]{1,15}", port) or not 1 <= int(port[1:]) <= 65535:
        raise Unfit(f"{quoted(listen)} has no port between 1 and 65535", mend)
    try:
        return Address(_listen_host(host), int(port[1:]))
    except ValueError:
        raise Unfit(f"{quoted(host)} is neither an IP address nor localhost", mend) from None


def _listen_host(host: str) -> str:
    if host in ("", "localhost"):
        return "127.0.0.1" if host else "0.0.0.0"  # noqa: S104  what ":8080" says
    bare = host[1:-1] if host.startswith("[") else host
    literal = ip_address(bare)
    # A zone index is meaningless on another machine, and brackets are for IPv6 alone.
    if "%" in bare or (literal.version == 6) != (bare != host):
        raise ValueError(host)
    return str(literal)


def base_url(value: object) -> str:
    """An http or https URL with a host and perhaps a port and a path; it is never repeated."""
    mend = 'write scheme, host and path only, such as "https://llm.example/api"'
    url = _string(value, mend)
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise Unfit(
            "holds a space or a character outside ASCII",
            "percent-encode the path and write the host in punycode",
        )
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise Unfit("has no scheme", mend)
    if scheme.lower() not in ("http", "https"):
        raise Unfit("has a scheme that is neither http nor https", mend)
    if "?" in rest or "#" in rest:
        raise Unfit("has a query or a fragment", f"remove it: {mend}; a key belongs in api_key_env")
    authority, _, path = rest.partition("/")
    if "@" in authority:
        raise Unfit(
            "holds credentials", "put the key in an environment variable and name it in api_key_env"
        )
    match = _AUTHORITY.fullmatch(authority)
    v6, host, port = match.groups() if match else (None, authority, None)
    if not v6 and not host:
        raise Unfit("has no host", mend)
    if match is None or (port is not None and not 1 <= int(port) <= 65535):
        raise Unfit("has no valid host and port", mend)
    if not _is_host(v6=v6, host=host):
        raise Unfit("has a host that is neither a name nor an IP address", mend)
    if not _URL_PATH.fullmatch(path):
        raise Unfit("has a path with characters that no URL may hold", "percent-encode them")
    return url


def _is_host(*, v6: str | None, host: str | None) -> bool:
    if host and _HOST_NAME.fullmatch(host):
        return True
    try:
        literal = ip_address(v6 or host or "")
    except ValueError:
        return False
    return isinstance(literal, IPv6Address) == bool(v6) and "%" not in (v6 or "")
