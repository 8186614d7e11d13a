"""Judges the files that a configuration names: certificates, CAs and keys; it never repeats a key.

A judge takes a path, raises `Unfit` where the gateway could not live with the file, and OSError where
it cannot be read. Certificates are OpenSSL's to judge, and Envoy's own library agrees with it.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from time import gmtime, strftime
from typing import Final, NamedTuple

from extproc.config.values import Unfit, secret

MIN_KEY_CHARS: Final = 16
EXPIRY_WARNING_S: Final = 14 * 86_400.0

_MAX_BYTES: Final = 1024 * 1024
"""A bundle with every public CA has a quarter of it."""
_MAX_TOLD: Final = 10
"""Lines of a file of clients' keys, one by one."""
_CLIENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY: Final = re.compile(r"[!-~]+")
_PRIVATE_KEY: Final = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----")
_NO_KEY: Final = (
    "the file holds no private key that can be read",
    "write it in PEM, without a passphrase",
)
_X509_V_FLAG_NO_CHECK_TIME: Final = 0x200000
"""Of OpenSSL's x509_vfy.h; Python has no name for it. The dates are compared here."""


class Warning(NamedTuple):  # noqa: A001  what it is
    problem: str
    mend: str


Judge = Callable[[str], Warning | None]


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A key that opens the gateway, and whose it is."""

    client: str
    key: str = field(repr=False)


def content(path: str) -> bytes:
    """Of a regular file of a sane size. Raise Unfit or OSError, and never wait for a writer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Unfit(f"{path} is no regular file", "name a file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise Unfit(f"the file is over {_MAX_BYTES} bytes", "keep in it what belongs there")
    return data


def client_keys(path: str) -> tuple[ClientKey, ...]:
    """The keys of a file: on each line a client's id and one key of it; `#` opens a comment.

    A client may have several keys, so that one can replace another without a gap. Raise Unfit, whose
    words name each unfit line and never a key, or OSError.
    """
    data = content(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unfit("the file is not UTF-8", "save it as plain text") from None
    keys: list[ClientKey] = []
    lines: dict[str, int] = {}
    found: list[Unfit] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_client_key(words, number, lines))
        except Unfit as unfit:
            found.append(unfit)
    if len(found) > _MAX_TOLD:  # it is another kind of file, most likely
        problem = f"{len(found) - _MAX_TOLD} more lines of the file are unfit"
        found[_MAX_TOLD:] = [Unfit(problem, "mend them alike")]
    if found:
        raise Unfit.of(found)
    if not keys:
        raise Unfit("the file holds no key, so nobody could come in", "add a line: CLIENT KEY")
    return tuple(keys)


def _client_key(words: list[str], number: int, lines: dict[str, int]) -> ClientKey:
    """Of line `number`; `lines`: where each key stands first."""
    where = f"line {number} of the file"
    if len(words) > 2 and words[2].startswith("#"):
        words = words[:2]
    form = "write the client's id, a space, and the key"
    if len(words) != 2:
        raise Unfit(f"{where} has {_count(words)}", form)
    client, key = words
    if not _CLIENT.fullmatch(client):
        problem = f"{where} does not begin with a client's id"
        raise Unfit(problem, f'{form}; ids are up to 64 letters, digits, ".", "_" and "-"')
    if not _KEY.fullmatch(key):
        problem = f"{where} has a key with characters that no header can hold"
        raise Unfit(problem, "use visible ASCII")
    if len(key) < MIN_KEY_CHARS:
        problem = f"{where} has a key of {len(key)} characters"
        raise Unfit(problem, f"use {MIN_KEY_CHARS} or more: openssl rand -hex 24")
    if (first := lines.setdefault(key, number)) != number:
        problem = f"{where} has the key of line {first}"
        raise Unfit(problem, "give each client a key of its own")
    return ClientKey(client, key)


def _count(words: list[str]) -> str:
    return "one word" if len(words) == 1 else f"{len(words)} words"


def holds_client_keys(path: str) -> None:
    client_keys(path)


def upstream_key(path: str) -> str:
    """The one key of a file; spaces and line breaks around it do not count. Raise Unfit or OSError."""
    text = content(path).decode("ascii", "replace")
    return secret(text.strip(" \t\r\n") or text, "the file")


def holds_a_key(path: str) -> None:
    upstream_key(path)


def certificates(path: str) -> None:
    _trusting(path)


def private_key(path: str) -> None:
    """As far as one can tell without its certificate."""
    if not _PRIVATE_KEY.search(content(path)):
        raise Unfit(*_NO_KEY)


def private_key_of(cert_path: str) -> Judge:
    """The key of the certificate at `cert_path`, which is fit."""

    def judge(path: str) -> None:
        content(path)  # OpenSSL would wait for the writer of a pipe
        _presenting(cert_path, path)

    return judge


def lifetime_with(key_path: str, now_s: float) -> Judge:
    """Of a certificate whose key is fit: whether it can serve at `now_s`, and for 14 days more."""

    def judge(path: str) -> Warning | None:
        try:
            own = _rehearse(_presenting(path, key_path), _trusting(path))
        except ssl.SSLCertVerificationError as error:
            problem = f"the certificate cannot be a server's: {error.verify_message}"
            raise Unfit(problem, "have one issued for TLS servers") from None
        begins_s, ends_s = (
            ssl.cert_time_to_seconds(str(own[date])) for date in ("notBefore", "notAfter")
        )
        if begins_s > now_s:
            problem = f"the certificate is not valid before {_date(begins_s)}"
            raise Unfit(problem, "renew it, or set the clock")
        if ends_s <= now_s:
            raise Unfit(f"the certificate expired on {_date(ends_s)}", "renew it")
        if ends_s - now_s < EXPIRY_WARNING_S:
            return Warning(f"the certificate expires on {_date(ends_s)}", "renew it soon")
        return None

    return judge


def authorities_at(now_s: float) -> Judge:
    """CA certificates, of which one at least is valid at `now_s`."""

    def judge(path: str) -> None:
        ends_s = [
            ssl.cert_time_to_seconds(str(each["notAfter"]))
            for each in _trusting(path).get_ca_certs()
        ]
        if ends_s and max(ends_s) <= now_s:
            problem = f"its last CA certificate expired on {_date(max(ends_s))}"
            raise Unfit(problem, "put a valid one into it")

    return judge


def _date(at_s: float) -> str:
    return strftime("%Y-%m-%d", gmtime(at_s))


def _trusting(path: str) -> ssl.SSLContext:
    """A client that trusts what is in the file, of whatever date."""
    text = content(path).decode("ascii", "replace")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _X509_V_FLAG_NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        problem = "the file holds no certificate that can be read"
        raise Unfit(problem, "write it in PEM: -----BEGIN CERTIFICATE-----") from None
    return context


def _presenting(cert_path: str, key_path: str) -> ssl.SSLContext:
    """A server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a passphrase at hand OpenSSL does not ask at the terminal; Envoy has none either.
        context.load_cert_chain(cert_path, key_path, password=lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = "the key is not that of the certificate in cert_file"
            raise Unfit(problem, "take both from one issuance") from None
        if error.reason is not None:
            reason = error.reason.lower().replace("_", " ")
            raise Unfit(
                f"the key or its certificate is refused: {reason}", "issue both anew"
            ) from None
        raise Unfit(*_NO_KEY) from None
    return context


def _rehearse(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """A handshake in memory, for what the client learns of the server's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server)
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):  # flights of TLS 1.2; 1.3 has fewer
        for end in (client_end, server_end):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(client_end.getpeercert() or {})
