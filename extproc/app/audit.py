"""`pointsman audit`: sets Envoy's counters beside the sidecar's, and names every difference."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from extproc.config import load
from extproc.core.errors import RouteReason
from extproc.core.ledger import UnseenCause
from extproc.demo import DEMO_CONFIG
from extproc.serving.envoy_stats import EnvoyStats, EnvoyUnreadableError, read_envoy
from extproc.serving.reconcile import INTERVAL_S

DEFAULT_WAIT_S: Final = 10.0
_POLL_S: Final = 0.25
_TIMEOUT: Final = aiohttp.ClientTimeout(total=3)


class AuditError(Exception):
    """The two sides cannot be compared."""


@dataclass(frozen=True, slots=True)
class Check:
    """One equation between the two sides."""

    what: str
    envoy: int
    parts: Mapping[str, int]
    """What the sidecar's side is made of."""
    sum: str
    """The same in words."""

    @property
    def sidecar(self) -> int:
        return sum(self.parts.values())

    @property
    def difference(self) -> int:
        return self.envoy - self.sidecar


@dataclass(frozen=True, slots=True)
class Audit:
    checks: tuple[Check, ...]
    beside: Mapping[str, int]
    """Counts that no equation holds for, and that explain a difference."""
    is_quiet: bool
    """Nothing moved between the last two looks; if not, records may have been under way."""

    @property
    def adds_up(self) -> bool:
        return not any(check.difference for check in self.checks)


def audit(path: Path | None, *, wait_s: float = DEFAULT_WAIT_S) -> Audit:
    """Compare a running gateway's two sides. Raise ConfigError or AuditError.

    Records travel some milliseconds, and what was lost is certain only at the sidecar's second
    reading of Envoy, so a difference gets `wait_s` seconds to close.
    """
    config = load(path or DEMO_CONFIG, environ=None)
    return asyncio.run(compare(config.admin.url, config.metrics.url, wait_s=wait_s))


async def compare(admin_url: str, metrics_url: str, *, wait_s: float) -> Audit:
    """See `audit`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    last: Audit | None = None
    quiet_since = loop.time()
    async with aiohttp.ClientSession() as session:
        while True:
            found = await _look(session, admin_url, metrics_url)
            if last is None or found.checks != last.checks:
                quiet_since = loop.time()
            is_quiet = last is not None and found.checks == last.checks
            found = Audit(found.checks, found.beside, is_quiet)
            # A difference that neither grows nor closes for two readings of the sidecar will stay.
            stays = loop.time() - quiet_since > 2 * INTERVAL_S + 1
            if (found.adds_up and is_quiet) or stays or loop.time() > deadline:
                return found
            last = found
            await asyncio.sleep(_POLL_S)


async def _look(session: aiohttp.ClientSession, admin_url: str, metrics_url: str) -> Audit:
    try:
        envoy = await read_envoy(session, admin_url)
        ours = await _scrape(session, metrics_url)
    except EnvoyUnreadableError as error:
        raise AuditError(str(error)) from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise AuditError(
            f"no metrics from {metrics_url}: {error or type(error).__name__}"
        ) from error
    return weigh(envoy, ours)


Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def _scrape(session: aiohttp.ClientSession, url: str) -> Samples:
    async with session.get(f"{url}/metrics", timeout=_TIMEOUT) as response:
        response.raise_for_status()
        text = await response.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def weigh(envoy: EnvoyStats, samples: Samples) -> Audit:
    """The equations that hold whenever nothing is under way."""

    def ours(name: str, **labels: str) -> int:
        wanted = labels.items()
        return round(
            sum(value for (found, had), value in samples.items() if found == name and wanted <= had)
        )

    offset = "pointsman_account_offset"
    unseen = "pointsman_requests_unseen_total"
    bypassed = RouteReason.DEGRADED_BYPASSED.value
    requests = Check(
        "requests",
        envoy.reading.ended,
        {
            "outcomes": ours("pointsman_requests_total"),
            "unseen": ours(unseen),
            "offset": ours(offset, of="requests"),
        },
        "outcomes + unseen + offset",
    )
    let_through = Check(
        "bypassed",
        envoy.reading.let_through,
        {
            "decisions bypassed": ours("pointsman_decisions_total", reason=bypassed),
            "our own faults": -ours("pointsman_internal_errors_total"),
            "unseen": ours(unseen, cause=UnseenCause.BYPASSED.value),
            "offset": ours(offset, of="bypassed"),
        },
        "decisions bypassed - our own faults + unseen + offset",
    )
    records = Check(
        "records",
        envoy.reading.records,
        {
            "received": ours("pointsman_records_total"),
            "lost": ours("pointsman_records_lost_total"),
            "offset": ours(offset, of="records"),
        },
        "received + lost + offset",
    )
    beside = {
        "requests under way": envoy.reading.active,
        "requests unseen": ours(unseen),
        "records dropped by Envoy": envoy.records_dropped,
        "records lost": ours("pointsman_records_lost_total"),
        "ext_proc streams started": envoy.streams_started,
        "ext_proc streams failed": envoy.streams_failed,
        "ext_proc messages timed out": envoy.message_timeouts,
    }
    return Audit((requests, let_through, records), beside, is_quiet=False)


def as_json(found: Audit) -> dict[str, Any]:
    return {
        "adds_up": found.adds_up,
        "quiet": found.is_quiet,
        "checks": [
            {**asdict(check), "sidecar": check.sidecar, "difference": check.difference}
            for check in found.checks
        ],
        "beside": dict(found.beside),
    }


def as_text(found: Audit) -> str:
    lines = [f"{'':<12}{'Envoy':>12}{'sidecar':>12}{'difference':>12}"]
    lines += [
        f"{check.what:<12}{check.envoy:>12}{check.sidecar:>12}{check.difference:>12}  {check.sum}"
        for check in found.checks
    ]
    lines += ["", *(f"{name:<30}{value:>12}" for name, value in found.beside.items()), ""]
    if found.adds_up:
        lines.append("every request is accounted for")
    else:
        names = ", ".join(check.what for check in found.checks if check.difference)
        moving = "" if found.is_quiet else " (traffic did not pause: ask again)"
        lines.append(f"does not add up: {names}{moving}")
    return "\n".join(lines)
