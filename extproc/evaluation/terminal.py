"""An evaluation as text for a person at a terminal; it measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from extproc.evaluation.evaluate import Evaluation
from extproc.evaluation.metrics import Rate

NOT_CALIBRATED: Final = (
    "thresholds cannot be calibrated: that takes prompts of routes and prompts of none "
    '("route": null), both decided by their scores'
)


def as_text(found: Evaluation) -> str:
    blocks = [
        _headline(found),
        _table(_route_rows(found)),
        "where prompts belong (rows) and where they went (columns)",
        _table(_confusion_rows(found)),
        _calibration(found),
    ]
    return "\n\n".join([*blocks, *(f"note: {note}" for note in notes(found))])


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.1f} %"


def rate_text(rate: Rate | None) -> str:
    if rate is None:
        return "–"
    return f"{percent(rate.share)}  (95 %: {rate.low * 100:.1f} to {rate.high * 100:.1f})"


def decided_by(found: Evaluation) -> str:
    return ", ".join(
        f"{reason} {percent(count / found.prompts)}" for reason, count in found.reasons.items()
    )


def duration(seconds: float) -> str:
    """Roughly, as one says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def progress_line(done: int, total: int, elapsed_s: float) -> str:
    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    left = f", {duration((total - done) / rate)} left" if rate else ""
    return f"{done:,} of {total:,} prompts ({done / total:.0%}), {rate:,.0f} a second{left}"


def _headline(found: Evaluation) -> str:
    outside = found.prompts - found.in_scope
    auroc = "–" if found.auroc is None else f"{found.auroc:.3f}"
    timing = found.timing
    took = f"p50 {timing.p50_ms:.2f} ms, p95 {timing.p95_ms:.2f} ms"
    rows = [
        ("prompts", f"{found.prompts:,}: {found.in_scope:,} in scope, {outside:,} of no route"),
        ("in scope, right", rate_text(found.accuracy)),
        ("  without thresholds", rate_text(found.top_1)),
        ("no route, to default", rate_text(found.rejection)),
        ("AUROC of best score", auroc),
        ("decided by", decided_by(found)),
        (
            "time a decision",
            f"{took}; {timing.decisions_per_s:,.0f} a second with {timing.workers} in flight",
        ),
    ]
    return "\n".join(f"{name:<22}{value}" for name, value in rows)


def _route_rows(found: Evaluation) -> list[Sequence[str]]:
    calibration = found.calibration
    now = calibration.now.thresholds if calibration else {}
    best = calibration.chosen.thresholds if calibration else {}
    rows: list[Sequence[str]] = [
        ("ROUTE", "PROMPTS", "PRECISION", "RECALL", "F1", "THRESHOLD", "BEST")
    ]
    for route in found.routes:
        shares = (percent(share) for share in (route.precision, route.recall, route.f1))
        thresholds = (_threshold(each, route.name) for each in (now, best))
        rows.append((route.name, f"{route.prompts:,}", *shares, *thresholds))
    return rows


def _threshold(thresholds: dict[str, float], route: str) -> str:
    return f"{thresholds[route]:.3f}" if route in thresholds else "–"


def _confusion_rows(found: Evaluation) -> list[Sequence[str]]:
    numbers = [str(number) for number in range(1, len(found.classes) + 1)]
    rows: list[Sequence[str]] = [("", *numbers)]
    for number, name, row in zip(numbers, found.classes, found.confusion, strict=True):
        rows.append((f"{number:>2} {name}", *(str(count) if count else "·" for count in row)))
    return rows


def _calibration(found: Evaluation) -> str:
    if found.calibration is None:
        return NOT_CALIBRATED
    now, one, each = found.calibration.now, found.calibration.one, found.calibration.each
    single = next(iter(one.thresholds.values()))
    rows = [("THRESHOLDS", "IN SCOPE", "NO ROUTE", "BALANCED", "ON UNSEEN")]
    rows += [
        (
            name,
            percent(fit.in_scope),
            percent(fit.out_of_scope),
            percent(fit.balanced),
            percent(fit.held_out),
        )
        for name, fit in (("in force", now), (f"one, {single:.3f}", one), ("one per route", each))
    ]
    chosen = "one per route" if found.calibration.chosen is each else "one for all routes"
    return _table(rows) + f"\nheld up best on unseen prompts: {chosen}"


def notes(found: Evaluation) -> list[str]:
    """What makes the figures say less than they seem to."""
    found_notes = []
    if found.undecided:
        found_notes.append(
            f"{_prompts(found.undecided)} could not be embedded: counted as sent to the default"
        )
    if found.repeated:
        found_notes.append(
            f"{_prompts(found.repeated)} in the data and among the routes' utterances, word for word: "
            "too easy, so leave them out of the data"
        )
    return found_notes


def _prompts(count: int) -> str:
    return f"{count:,} prompt{'' if count == 1 else 's'}"


def _table(rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
