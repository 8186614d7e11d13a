"""The status page over HTTP: /, /status.json, POST /route, and who may ask; it knows nothing it shows.

There is no log-in: whoever reaches the port may look. A browser on the same machine is another
matter, because any web page can make it ask. So what a page of another origin asks is refused, and
so is every name that somebody else's DNS could point at this address (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol

from aiohttp import web

MOST_BYTES: Final = 64 * 1024
"""Of a prompt to try."""
_READ_S: Final = 5.0
_DECIDE_S: Final = 10.0
"""Far beyond any deadline: only a stuck loop takes so long."""

# Nobody can register a name under these, or one without a dot: such a name is the user's own.
_PRIVATE_SUFFIXES: Final = (".localhost", ".internal", ".svc")
_JSON: Final = "application/json"


class Status(Protocol):
    """What there is to show; called on the admin listener's thread."""

    def document(self) -> bytes:
        """JSON."""
        ...

    def decide(self, body: bytes) -> Future[tuple[int, bytes]]:
        """A decision about a prompt: status and JSON. Fails with NotYetError or TooManyTriesError."""
        ...


class NotYetError(Exception):
    """The sidecar is still starting."""


class TooManyTriesError(Exception):
    """As many prompts are being tried as may."""


def routes(status: Status) -> list[web.RouteDef]:
    content = Path(__file__).with_name("status.html").read_bytes()
    headers = _headers(content.decode())

    async def index(request: web.Request) -> web.Response:
        guard(request, navigation=True)
        return web.Response(body=content, headers=headers)

    async def document(request: web.Request) -> web.Response:
        guard(request)
        return _json(200, status.document())

    async def decide(request: web.Request) -> web.Response:
        guard(request)
        if (
            request.content_type != _JSON
        ):  # which a form or a plain cross-origin request cannot send
            return _error(415, "unsupported_media_type", "Send the body as application/json.")
        if request.headers.get("content-encoding", "identity") != "identity":
            return _closing(_error(415, "unsupported_content_encoding", "Send the body as it is."))
        try:
            async with asyncio.timeout(_READ_S):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _closing(
                _error(413, "request_too_large", f"A prompt to try has {MOST_BYTES} bytes at most.")
            )
        except TimeoutError:
            return _closing(_error(408, "request_timeout", "The body did not come in time."))
        try:
            async with asyncio.timeout(_DECIDE_S):
                code, answer = await asyncio.wrap_future(status.decide(body))
        except NotYetError:
            return _error(503, "starting", "The sidecar is still starting.")
        except TooManyTriesError:
            return _error(
                429, "too_many_tries", "Others are trying prompts; try again in a moment."
            )
        except TimeoutError:
            return _error(503, "router_unavailable", "The serving loop does not answer.")
        return _json(code, answer)

    return [
        web.get("/", index),
        web.get("/status.json", document),
        web.post("/route", decide),
    ]


def guard(request: web.Request, *, navigation: bool = False) -> None:
    """Raise HTTPForbidden or HTTPMisdirectedRequest for what another site made a browser ask.

    `navigation`: following a link to here is no such thing.
    """
    if (why := refusal(request.host, request.headers, navigation=navigation)) is not None:
        kind = web.HTTPMisdirectedRequest if why is _BAD_HOST else web.HTTPForbidden
        raise kind(text=f"{why}\n")


_BAD_HOST: Final = (
    "Ask by IP address, as localhost, or by a name of a private network: "
    "any other could be somebody else's that leads here."
)
_BAD_ORIGIN: Final = "Another site's page asks; only this one's own may."


def refusal(host: str, headers: Mapping[str, str], *, navigation: bool = False) -> str | None:
    """Why not to answer. `host`: the Host header."""
    if not _is_own_name(host):
        return _BAD_HOST
    if navigation and headers.get("Sec-Fetch-Mode") == "navigate":
        return None
    if headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
        return _BAD_ORIGIN
    # Scheme and all: behind a proxy with TLS it is https.
    if headers.get("Origin", f"http://{host}").partition("://")[2] != host:
        return _BAD_ORIGIN
    return None


_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


def _is_own_name(host: str) -> bool:
    if (match := _HOST.fullmatch(host)) is None:
        return False
    name = match[1].strip("[]").lower().removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return ("." not in name and not name.isdecimal()) or name.endswith(_PRIVATE_SUFFIXES)
    return True


def _headers(page: str) -> dict[str, str]:
    """Nothing runs on the page, and nothing is fetched, but what it holds itself."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash(page, "script"),
        "style-src": _hash(page, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # Text goes in as text: assigning markup throws.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cross-origin-opener-policy": "same-origin",
        **_ALWAYS,
    }


_ALWAYS: Final = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _hash(page: str, element: str) -> str:
    (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, headers={"content-type": _JSON, **_ALWAYS})


def _closing(response: web.Response) -> web.Response:
    """Its request's body was not read, so that the connection is of no more use: say so."""
    response.force_close()
    return response


def _error(status: int, code: str, message: str) -> web.Response:
    """In the shape of the gateway's own errors."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    if status >= 500:
        error["type"] = "server_error"
    return _json(status, json.dumps({"error": error}).encode())
