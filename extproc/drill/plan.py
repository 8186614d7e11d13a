"""Which fault meets which gateway, and what has to follow from that; it runs and measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from extproc.config import Config, route_chain, upstream_chain
from extproc.core.circuit import CircuitPolicy
from extproc.core.errors import FallbackReason

DEFAULT_RPS: Final = 10.0
MOST_RPS: Final = 200.0
"""Beyond it this client would measure itself."""
_SPARE_S: Final = 2.0
"""What every wait grants beyond the times of the config, for a slow machine."""


class DrillFault(StrEnum):
    """What is made on the upstream; the names are those of the demo's fault switch."""

    HANG = "hang"
    SERVER_ERROR = "5xx"
    REFUSED = "refused"
    RESET = "reset"
    BAD_SCHEMA = "bad_schema"
    FLAKY = "flaky"
    SLOW_FIRST_TOKEN = "slow_first_token"  # noqa: S105  a token of text
    CUT_STREAM = "cut_stream"


_REASONS: Final[Mapping[DrillFault, FallbackReason]] = {
    DrillFault.HANG: FallbackReason.TIMEOUT,
    DrillFault.SERVER_ERROR: FallbackReason.SERVER_ERROR,
    DrillFault.REFUSED: FallbackReason.CONNECT_ERROR,
    DrillFault.RESET: FallbackReason.CONNECT_ERROR,
    DrillFault.BAD_SCHEMA: FallbackReason.BAD_SCHEMA,
    DrillFault.FLAKY: FallbackReason.SERVER_ERROR,
    DrillFault.SLOW_FIRST_TOKEN: FallbackReason.TIMEOUT,
}
_STREAMING: Final = frozenset({DrillFault.SLOW_FIRST_TOKEN, DrillFault.CUT_STREAM})


class PlanError(Exception):
    """Why a drill cannot be made, or not on this gateway, and what would help."""


def parse_faults(words: Sequence[str]) -> tuple[DrillFault, ...]:
    """In the order given, each once; `all` is all of them. Raise PlanError."""
    if "all" in words:
        return tuple(DrillFault)
    unknown = [word for word in words if word not in set(DrillFault)]
    if unknown:
        known = ", ".join(DrillFault)
        raise PlanError(f"there is no fault {unknown[0]!r}; there are {known}, and all")
    return tuple(dict.fromkeys(DrillFault(word) for word in words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One fault on one upstream, and all of the gateway's config that decides what must follow."""

    fault: DrillFault
    upstream: str
    """Its id."""
    name: str
    ask_for: str
    """The `model` that clients send."""
    models: Mapping[str, str]
    """Upstream id -> model, for every upstream of the chain in order."""
    policy: CircuitPolicy
    inference_timeout_s: float
    first_token_timeout_s: float | None
    max_retries: int
    visit_limit_s: float
    patience_s: float
    """When a client gives a request up as lost."""
    rps: float

    @property
    def streams(self) -> bool:
        return self.fault in _STREAMING

    @property
    def reason(self) -> FallbackReason | None:
        """What clients and metrics are told of the fault; None: it makes nobody fall back."""
        if self.fault is DrillFault.SLOW_FIRST_TOKEN and self.first_token_timeout_s is None:
            return None
        return _REASONS.get(self.fault)

    @property
    def opens(self) -> bool:
        return self.reason in self.policy.counted_errors

    @property
    def first_token_delay_s(self) -> float:
        return 3 * (self.first_token_timeout_s or self.inference_timeout_s)

    def switch(self) -> dict[str, Any]:
        """The JSON of the fault switch. The fault ends by itself should the drill be killed."""
        document: dict[str, Any] = {"kind": self.fault.value, "for_s": round(self.at_most_s + 10)}
        if self.fault is DrillFault.FLAKY:
            # As many failed requests in a row as just fail to reach the threshold, each with its
            # retries, then a success.
            failed = max(1, self.policy.failure_threshold - 1) * (1 + self.max_retries)
            document |= {"fail": failed, "of": failed + 1}
        if self.fault is DrillFault.SLOW_FIRST_TOKEN:
            document["delay_s"] = self.first_token_delay_s
        return document

    # How long each part may take, seconds.

    @property
    def calm_s(self) -> float:
        """Ordinary traffic before the fault, after the recovery, and before the mending."""
        return min(3.0, max(1.0, self.policy.cooldown_s / 10))

    @property
    def opens_within_s(self) -> float:
        return 2 * self.policy.failure_threshold / self.rps + self.visit_limit_s + _SPARE_S

    @property
    def stays_closed_s(self) -> float:
        """How long a fault that must not open the circuit is given to do so."""
        return 2 * self.policy.failure_threshold / self.rps + _SPARE_S

    @property
    def trial_fails_within_s(self) -> float:
        return self.policy.cooldown_s + self.visit_limit_s + _SPARE_S

    @property
    def back_within_s(self) -> float:
        """From the mending to the first answer of the upstream."""
        return self.policy.cooldown_s + self.inference_timeout_s + _SPARE_S

    @property
    def at_most_s(self) -> float:
        opening_s = max(self.opens_within_s, self.stays_closed_s)
        waits_s = opening_s + self.trial_fails_within_s + self.back_within_s
        return 3 * self.calm_s + waits_s + self.patience_s + 10 * _SPARE_S

    @property
    def about_s(self) -> float:
        """What to tell a person who waits."""
        opening_s = self.policy.failure_threshold / self.rps + self.inference_timeout_s
        if not self.opens:
            unlimited = self.fault is DrillFault.SLOW_FIRST_TOKEN and self.reason is None
            delay_s = self.first_token_delay_s if unlimited else 0.0
            return 2 * self.calm_s + self.stays_closed_s + delay_s
        return 3 * self.calm_s + opening_s + 2 * self.policy.cooldown_s + self.inference_timeout_s


def plan(config: Config, upstream_id: str, fault: DrillFault, *, rps: float) -> Setting:
    """What `config` makes of a fault on one of its upstreams. Raise PlanError."""
    if not 0 < rps <= MOST_RPS:
        raise PlanError(f"--rps must be over 0 and at most {MOST_RPS:g}")
    upstream = config.upstreams.get(upstream_id)
    if upstream is None:
        known = ", ".join(config.upstreams)
        raise PlanError(f"there is no upstream {upstream_id!r} in the config; it has {known}")
    chain = next(each for each in config.chains() if each.name == upstream_chain(upstream_id))
    if len(chain.upstreams) + chain.rule < 2:
        raise PlanError(f"nothing stands behind {upstream_id}: its clients would get its failures")
    policy = config.circuit
    if 2 * policy.failure_threshold / rps > policy.window_s:
        raise PlanError(
            f"{rps:g} requests a second are too few for {policy.failure_threshold} failures"
            f" in {policy.window_s:g} s; raise --rps"
        )
    visits_s = [config.visit_limit_s(config.upstreams[each]) for each in chain.upstreams]
    token_s = 3 * (upstream.first_token_timeout_s or upstream.inference_timeout_s)
    return Setting(
        fault=fault,
        upstream=upstream_id,
        name=upstream.name,
        ask_for=_ask_for(config, upstream_id),
        models={each: config.upstreams[each].model for each in chain.upstreams},
        policy=policy,
        inference_timeout_s=upstream.inference_timeout_s,
        first_token_timeout_s=upstream.first_token_timeout_s,
        max_retries=config.retry.max_retries,
        visit_limit_s=visits_s[0],
        patience_s=sum(visits_s) + token_s + 5 * _SPARE_S,
        rps=rps,
    )


def _ask_for(config: Config, upstream_id: str) -> str:
    """`auto` where that can only mean this upstream's chain, else the upstream itself."""
    signals = any(route.utterances or route.has_rules for route in config.routes)
    default = next(c for c in config.chains() if c.name == route_chain(config.router.default))
    if signals or default.upstreams[0] != upstream_id or not config.router.aliases:
        return upstream_id
    return config.router.aliases[0]
