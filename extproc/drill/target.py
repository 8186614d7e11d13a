"""The HTTP ends of a gateway under drill: listener, metrics, admin, fault switch; it decides nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from extproc.core import wire_names
from extproc.core.circuit import State
from extproc.drill.events import Answered, Ended, Look, Totals, Visit
from extproc.drill.plan import Setting

CHAT: Final = "/v1/chat/completions"
_WITHIN_S: Final = 5.0
"""For everything but the load."""
_STATES: Final = {0.0: State.CLOSED, 1.0: State.HALF_OPEN, 2.0: State.OPEN}
_ENVOY_REQUESTS: Final = "http.ingress.downstream_rq_total"


class DrillError(Exception):
    """The drill cannot begin or go on; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Access:
    """What the gateway's listener wants to see of a client."""

    key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    """Whom to trust where its URL is https."""

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}


@dataclass(frozen=True, slots=True)
class Ends:
    """Base URLs, without a trailing slash."""

    gateway: str
    metrics: str
    admin: str
    switch: str
    """A demo upstream that can switch the faults of the one under drill."""
    access: Access = Access()


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def new_session() -> aiohttp.ClientSession:
    """A connection for each request, so that none waits for, or is broken with, another."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=_WITHIN_S),
    )


async def let_in(session: aiohttp.ClientSession, gateway: str, access: Access) -> None:
    """Raise DrillError where the gateway would turn away every question of the drill."""
    try:
        async with session.get(
            f"{gateway}/v1/models", headers=access.headers, ssl=access.tls or True
        ) as response:
            status = response.status
    except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError) as error:
        raise DrillError(f"{gateway}: {error}; name the CA with --ca-file") from error
    except (aiohttp.ClientError, OSError) as error:
        raise DrillError(f"{gateway} does not answer: {error or type(error).__name__}") from error
    if status == 401:
        raise DrillError(f"{gateway} wants a client's key, or another one: --api-key-env NAME")


async def find_switch(
    session: aiohttp.ClientSession, bases: Mapping[str, str], upstream: str
) -> str:
    """Who can break and mend `upstream`; `bases`: upstream id -> `http://HOST:PORT`.

    Another one in the same process, if there is one: `refused` closes its own port. Raise DrillError.
    """
    others = [base for each, base in bases.items() if each != upstream]
    for base in [*others, bases[upstream]]:
        if not is_loopback(base):
            continue
        try:
            async with session.get(f"{base}/demo/fault", params={"upstream": upstream}) as response:
                if response.status != 200:
                    continue
                state = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            continue
        if not isinstance(state, dict) or "listening" not in state:
            continue
        if state["fault"] is not None:
            kind = state["fault"].get("kind")
            raise DrillError(
                f"{upstream} is broken already ({kind}); mend it first:"
                f" curl -X DELETE '{base}/demo/fault?upstream={upstream}'"
            )
        return base
    raise DrillError(
        f"{upstream} at {bases[upstream]} is no demo upstream of this machine that answers"
        " on /demo/fault: only such an upstream can be broken on purpose"
    )


class Target:
    """One gateway and the upstream under drill. Nothing in it changes; `clock` is the drill's."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        ends: Ends,
        setting: Setting,
        *,
        fallback_metric: str,
        run: str,
        clock: Callable[[], float],
    ) -> None:
        """`run` sets this drill's requests apart from all others in the upstreams' records."""
        self._session = session
        self._ends = ends
        self._setting = setting
        self._fallback_metric = fallback_metric
        self._run = run
        self._clock = clock

    async def make_fault(self) -> None:
        document = {**self._setting.switch(), "upstream": self._setting.upstream}
        await self._fetch("POST", f"{self._ends.switch}/demo/fault", json=document)

    async def mend(self) -> None:
        params = {"upstream": self._setting.upstream}
        await self._fetch("DELETE", f"{self._ends.switch}/demo/fault", params=params)

    async def look(self) -> Look:
        begun_s = self._clock()
        text = await self._fetch("GET", f"{self._ends.metrics}/metrics")
        return read_look(text, self._setting.name, begun_s=begun_s, done_s=self._clock())

    async def totals(self) -> Totals:
        ejections = (
            f"cluster.tier.{self._setting.upstream}.outlier_detection.ejections_enforced_total"
        )
        # The filter is a regular expression: that its dots match more than dots does no harm.
        params = {"filter": f"{_ENVOY_REQUESTS}|{ejections}"}
        text = await self._fetch("GET", f"{self._ends.metrics}/metrics")
        stats = await self._fetch("GET", f"{self._ends.admin}/stats", params=params)
        return read_totals(
            text,
            read_stats(stats),
            name=self._setting.name,
            fallback_metric=self._fallback_metric,
            ejections=ejections,
            at_s=self._clock(),
        )

    async def visits(self) -> list[Visit]:
        """What the upstreams of the chain saw of this drill, as far as they are demo upstreams."""
        found: list[Visit] = []
        for upstream in self._setting.models:
            params = {"upstream": upstream, "last": "1000000"}
            try:
                text = await self._fetch("GET", f"{self._ends.switch}/demo/seen", params=params)
            except DrillError:
                if upstream == self._setting.upstream:
                    raise
                continue
            found += read_visits(text, upstream, self._run, now_s=self._clock())
        return found

    async def ask(self, serial: int, *, due_s: float) -> Answered:
        """One request as a client would send it; whatever becomes of it is an answer."""
        setting = self._setting
        status, heads, body = 0, dict[str, str](), b""
        broke_off = False
        first_s: float | None = None
        try:
            async with (
                asyncio.timeout(setting.patience_s),
                self._session.post(
                    self._ends.gateway + CHAT,
                    data=_question(setting, serial),
                    headers={
                        "content-type": "application/json",
                        "x-request-id": f"{self._run}-{serial}",
                        **self._ends.access.headers,
                    },
                    ssl=self._ends.access.tls or True,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as response,
            ):
                status = response.status
                heads = {name.lower(): value for name, value in response.headers.items()}
                async for piece in response.content.iter_any():
                    first_s = self._clock() if first_s is None else first_s
                    body += piece
        except (aiohttp.ClientError, OSError):  # TimeoutError is one
            broke_off = True
        done_s = self._clock()
        ended = how_ended(status, body, streams=setting.streams, broke_off=broke_off)
        flowed = setting.streams and ended is Ended.WHOLE
        return Answered(
            serial=serial,
            sent_s=due_s,
            done_s=done_s,
            took_s=(first_s if first_s is not None and flowed else done_s) - due_s,
            status=status,
            ended=ended,
            upstream=heads.get(wire_names.UPSTREAM, ""),
            fallback=heads.get(wire_names.FALLBACK, ""),
            attempts=heads.get(wire_names.ATTEMPTS, ""),
        )

    async def _fetch(self, method: str, url: str, **options: Any) -> str:
        try:
            async with self._session.request(method, url, **options) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise DrillError(f"{url} does not answer: {error or type(error).__name__}") from error
        if response.status != 200:
            raise DrillError(f"{url} answers {response.status}: {text.strip()[:200]}")
        return text


def _question(setting: Setting, serial: int) -> bytes:
    message = {"role": "user", "content": f"drill {serial}"}
    return msgspec.json.encode(
        {"model": setting.ask_for, "messages": [message], "stream": setting.streams}
    )


def how_ended(status: int, body: bytes, *, streams: bool, broke_off: bool) -> Ended:
    if not status:
        return Ended.NOTHING
    if broke_off:
        return Ended.BROKEN
    if not streams:
        return Ended.WHOLE if status != 200 or _has_choices(body) else Ended.SHORT
    lines = body.splitlines()
    if any(line.startswith(b"event: error") or _tells_error(line) for line in lines):
        return Ended.BROKEN
    return Ended.WHOLE if status != 200 or b"data: [DONE]" in lines else Ended.SHORT


def _has_choices(body: bytes) -> bool:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(answer, dict) and bool(answer.get("choices"))


def _tells_error(line: bytes) -> bool:
    try:
        event = msgspec.json.decode(line.removeprefix(b"data:"))
    except msgspec.DecodeError:
        return False
    return isinstance(event, dict) and "error" in event


def read_look(text: str, name: str, *, begun_s: float, done_s: float) -> Look:
    """`text`: the sidecar's /metrics; `name`: the upstream's. Raise DrillError where it is not there."""
    mine = {"upstream": name}
    states = list(_samples(text, "pointsman_circuit_state", mine))
    if not states:
        raise DrillError(f"the sidecar's metrics have no pointsman_circuit_state of {name}")
    entered = _by_label(text, "pointsman_circuit_transitions_total", "to", mine)
    return Look(
        begun_s=begun_s,
        done_s=done_s,
        state=_STATES[states[0][1]],
        entered={state: entered.get(state, 0) for state in State},
    )


def read_totals(
    text: str,
    stats: Mapping[str, int],
    *,
    name: str,
    fallback_metric: str,
    ejections: str,
    at_s: float,
) -> Totals:
    """`text`: the sidecar's /metrics; `ejections`: which of Envoy's `stats` counts them."""
    fallbacks = fallback_metric.removesuffix("_total") + "_total"  # as prometheus-client names it
    return Totals(
        at_s=at_s,
        outcomes=_by_label(text, "pointsman_requests_total", "outcome"),
        fallbacks=_by_label(text, fallbacks, "reason", {"from": name}),
        envoy_requests=stats.get(_ENVOY_REQUESTS, 0),
        ejections=stats.get(ejections, 0),
    )


def _by_label(
    text: str, sample: str, label: str, only: Mapping[str, str] | None = None
) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for labels, value in _samples(text, sample, only or {}):
        counts[labels[label]] += int(value)
    return dict(counts)


def _samples(
    text: str, sample: str, only: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, str], float]]:
    # Only those lines are parsed: twenty times a second, beside the clients whose time is taken.
    lines = (line for line in text.splitlines() if line.startswith((f"{sample}{{", f"{sample} ")))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for each in family.samples:
            if only.items() <= each.labels.items():
                yield each.labels, each.value


def read_stats(text: str) -> dict[str, int]:
    """Envoy's /stats: counters and gauges by name."""
    pairs = (line.rpartition(": ") for line in text.splitlines())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


def read_visits(text: str, upstream: str, run: str, *, now_s: float) -> Iterable[Visit]:
    """`text`: the answer of /demo/seen, just read."""
    for seen in msgspec.json.decode(text)["last"]:
        owner, _, serial = seen["headers"].get("x-request-id", "").rpartition("-")
        if owner == run:
            yield Visit(upstream, int(serial), now_s - seen["ago_s"], seen["model"])
