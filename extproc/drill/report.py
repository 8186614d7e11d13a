"""What a drill found, as lines for a person and as one JSON document; it finds nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from extproc.drill.expectations import Expectation, Verdict
from extproc.drill.plan import Setting
from extproc.drill.timeline import Row
from extproc.drill.words import many

_VERDICT_WIDTH: Final = max(len(verdict) for verdict in Verdict)


@dataclass(frozen=True, slots=True)
class Report:
    setting: Setting
    rows: tuple[Row, ...]
    expectations: tuple[Expectation, ...]

    @property
    def held(self) -> bool:
        return all(each.verdict is not Verdict.NOT_HELD for each in self.expectations)


def heading(setting: Setting, gateway_url: str) -> Iterator[str]:
    policy = setting.policy
    counted = ", ".join(sorted(policy.counted_errors))
    yield (
        f"drill {setting.fault}: {setting.rps:g} requests a second to {gateway_url},"
        f" about {setting.about_s:.0f} s"
    )
    failures = many(policy.failure_threshold, "failure")
    trials = many(policy.half_open_max_requests, "trial")
    yield (
        f"policy: {failures} ({counted}) in {policy.window_s:g} s, then {policy.cooldown_s:g} s open,"
        f" then {trials} at once; {setting.inference_timeout_s:g} s to response headers"
    )
    yield ""
    yield "     t  what happened"


def row_line(row: Row) -> str:
    return f"{row.at_s:6.1f}  {row.text}"


def table(expectations: Sequence[Expectation]) -> Iterator[str]:
    width = max(len(each.name) for each in expectations)
    yield ""
    for each in expectations:
        yield f"{each.verdict:<{_VERDICT_WIDTH}}  {each.name:<{width}}  {each.measured}"
    failed = sum(each.verdict is Verdict.NOT_HELD for each in expectations)
    told = sum(each.verdict is not Verdict.NOT_CONFIGURED for each in expectations)
    yield ""
    of = many(told, "expectation")
    yield f"{failed} of {of} NOT HELD" if failed else f"all {of} held"


def document(reports: Sequence[Report]) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "held": all(report.held for report in reports),
        "drills": [_drill(report) for report in reports],
    }


def _drill(report: Report) -> dict[str, Any]:
    setting, policy = report.setting, report.setting.policy
    return {
        "fault": setting.fault.value,
        "held": report.held,
        "upstream": setting.name,
        "requests_per_second": setting.rps,
        "policy": {
            "failure_threshold": policy.failure_threshold,
            "window_s": policy.window_s,
            "cooldown_s": policy.cooldown_s,
            "half_open_max_requests": policy.half_open_max_requests,
            "counted_errors": sorted(policy.counted_errors),
            "inference_timeout_s": setting.inference_timeout_s,
            "first_token_timeout_s": setting.first_token_timeout_s,
            "max_retries": setting.max_retries,
        },
        "timeline": [{"t_s": round(row.at_s, 3), "what": row.text} for row in report.rows],
        "expectations": [
            {
                "name": each.name,
                "verdict": each.verdict.value,
                "measured": each.measured,
                **({"values": each.values} if each.values else {}),
            }
            for each in report.expectations
        ],
    }
