"""Envoy's own counters over its admin interface, as one Reading; it knows no counter of ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import aiohttp

from extproc.core.ledger import Reading

_REQUESTS: Final = "http.ingress.downstream_rq_"
_EXT_PROC: Final = "http.ingress.ext_proc."
_LOGS: Final = "access_logs.grpc_access_log.logs_"
_WANTED: Final = (
    f"{_REQUESTS}total",
    f"{_REQUESTS}active",
    f"{_EXT_PROC}failure_mode_allowed",
    f"{_EXT_PROC}streams_started",
    f"{_EXT_PROC}streams_failed",
    f"{_EXT_PROC}message_timeouts",
    f"{_LOGS}written",
    f"{_LOGS}dropped",
)
_FILTER: Final = "^(" + "|".join(name.replace(".", r"\.") for name in _WANTED) + ")$"
_TIMEOUT: Final = aiohttp.ClientTimeout(total=2)


class EnvoyUnreadableError(Exception):
    """Envoy's admin interface does not answer, or not with what we asked for."""


@dataclass(frozen=True, slots=True)
class EnvoyStats:
    """What the accounts need, and what only a person wants to see beside it."""

    reading: Reading
    streams_started: int
    streams_failed: int
    message_timeouts: int
    records_dropped: int


async def read_envoy(session: aiohttp.ClientSession, admin_url: str) -> EnvoyStats:
    """Raise EnvoyUnreadableError."""
    try:
        text = await _get(session, f"{admin_url}/stats", {"filter": _FILTER})
        # The moment the static clusters were made: the only mark of a process in milliseconds.
        dump = await _get(
            session,
            f"{admin_url}/config_dump",
            {"resource": "static_clusters", "mask": "last_updated"},
        )
        return _parse(text, dump)
    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
        raise EnvoyUnreadableError(
            f"no counters from {admin_url}: {error or type(error).__name__}"
        ) from error


def _parse(text: str, dump: str) -> EnvoyStats:
    found = {name: int(value) for name, _, value in (x.partition(": ") for x in text.splitlines())}
    # Envoy creates a filter's counters with its first connection.
    value = {name: found.get(name, 0) for name in _WANTED}
    return EnvoyStats(
        Reading(
            epoch=json.loads(dump)["configs"][0]["last_updated"],
            started=value[f"{_REQUESTS}total"],
            active=value[f"{_REQUESTS}active"],
            let_through=value[f"{_EXT_PROC}failure_mode_allowed"],
            records=value[f"{_LOGS}written"],
        ),
        streams_started=value[f"{_EXT_PROC}streams_started"],
        streams_failed=value[f"{_EXT_PROC}streams_failed"],
        message_timeouts=value[f"{_EXT_PROC}message_timeouts"],
        records_dropped=value[f"{_LOGS}dropped"],
    )


async def _get(session: aiohttp.ClientSession, url: str, params: dict[str, str]) -> str:
    async with session.get(url, params=params, timeout=_TIMEOUT) as response:
        response.raise_for_status()
        return await response.text()
