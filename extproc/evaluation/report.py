"""An evaluation as one HTML file that needs nothing else; it measures nothing and opens only its style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree.ElementTree import Element

from extproc.evaluation.calibrate import FOLDS, Calibration, Fit, Sweep
from extproc.evaluation.evaluate import NO_ROUTE, Evaluation, Mistake
from extproc.evaluation.html import Node, el, page
from extproc.evaluation.metrics import Histogram, Rate
from extproc.evaluation.prompts import printable
from extproc.evaluation.terminal import NOT_CALIBRATED, decided_by, notes, percent

_STYLE: Final = Path(__file__).with_name("report.css")
_NOTHING_FROM_OUTSIDE: Final = "default-src 'none'; style-src 'unsafe-inline'"
_MANY: Final = 5
"""Beyond so many columns their names stand upright."""
_GAMMA: Final = 0.7
"""Lifts small shares, so that mistakes can be seen beside what is right."""
_STRONG: Final = 0.75
"""From this shade on a cell is so dark that its figure must be light."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was evaluated, and when, as the reader should see it."""

    data: str
    config: str
    when: str


def as_html(found: Evaluation, subject: Subject) -> str:
    title = f"Routing of {printable(subject.data)}"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_NOTHING_FROM_OUTSIDE),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", _STYLE.read_text(encoding="utf-8")),
    )
    where = f"Routes of {printable(subject.config)}, {subject.when}. "
    kinds = f"{found.in_scope:,} prompts of its routes, {found.prompts - found.in_scope:,} of none."
    main = el(
        "main",
        el("h1", title),
        el("p", where + kinds, class_="dim"),
        *(el("p", f"{note}.", class_="note") for note in notes(found)),
        _tiles(found),
        el("p", f"Decided by: {decided_by(found)}.", class_="about"),
        *_confusion(found),
        *_distributions(found),
        *_calibration(found),
        *_routes(found),
        *_mistakes(found),
    )
    return page(el("html", head, el("body", main), lang="en"))


# --- headline --------------------------------------------------------------------------------------


def _tiles(found: Evaluation) -> Element:
    timing = found.timing
    auroc = "–" if found.auroc is None else f"{found.auroc:.3f}"
    default = f"of prompts of no route arrive at {found.default}"
    return el(
        "div",
        _rate_tile("In scope, right", found.accuracy, "arrive at their route"),
        _rate_tile("Best route, right", found.top_1, "in scope, without thresholds"),
        _rate_tile("Out of scope, right", found.rejection, default),
        _tile("AUROC", auroc, "of the best score, as a sign that a prompt belongs to a route"),
        _tile(
            "A decision takes",
            f"{timing.p50_ms:.1f} ms",
            "median",
            f"95 % within {timing.p95_ms:.1f} ms",
        ),
        _tile(
            "Decisions a second",
            f"{timing.decisions_per_s:,.0f}",
            f"with {timing.workers} in flight",
        ),
        class_="tiles",
    )


def _rate_tile(name: str, rate: Rate | None, what: str) -> Element:
    if rate is None:
        return _tile(name, "–", "no such prompt in the data")
    interval = f"95 %: {rate.low * 100:.1f} to {rate.high * 100:.1f}"
    return _tile(name, percent(rate.share), what, interval)


def _tile(name: str, value: str, *more: str) -> Element:
    return el(
        "div",
        el("div", name, class_="name"),
        el("div", value, class_="value"),
        *(el("div", line, class_="more") for line in more),
        class_="tile card",
    )


# --- confusion -------------------------------------------------------------------------------------


def _confusion(found: Evaluation) -> list[Node]:
    about = (
        "A row is where prompts belong, a column where they went; shading is the share of the row. "
        f"Blue is right, orange is wrong. What no route admits goes to {found.default}, so "
        f"{NO_ROUTE} and {found.default} are one place."
    )
    many = " many" if len(found.classes) > _MANY else ""
    header = el(
        "tr", el("th"), *(el("th", el("span", name), scope="col") for name in found.classes)
    )
    rows = [
        el("tr", el("th", name, scope="row"), *_cells(found, name, row))
        for name, row in zip(found.classes, found.confusion, strict=True)
    ]
    table = el("table", el("thead", header), el("tbody", *rows), class_="heat" + many)
    return [
        el("h2", "Where prompts went"),
        el("p", about, class_="about"),
        el("div", table, class_="card scroll"),
    ]


def _cells(found: Evaluation, label: str, row: Sequence[int]) -> Iterable[Element]:
    total = max(1, sum(row))
    one_place = {found.default, NO_ROUTE}
    for outcome, count in zip(found.classes, row, strict=True):
        share = count / total
        heat = share**_GAMMA
        classes = ["right"] if outcome == label or {outcome, label} == one_place else []
        if heat >= _STRONG:
            classes.append("strong")
        if not count:
            classes.append("zero")
        yield el(
            "td",
            el("span", f"{count:,}" if count else "·"),
            class_=" ".join(classes) or None,
            style=f"--heat:{heat:.3f}",
            title=f"{label} → {outcome}: {count:,} of {sum(row):,} ({percent(share)})",
        )


# --- score distributions ---------------------------------------------------------------------------

_WIDTH: Final = 300
_HEIGHT: Final = 96
_BASE: Final = 80
_TOP: Final = 12
_SIDE: Final = 6
_TICK: Final = 0.2


def _distributions(found: Evaluation) -> list[Node]:
    if not found.histograms:
        return []
    about = (
        "How well prompts fit each route. The further the blue ones lie right of the others, the "
        "better the route's utterances describe it. Each shape is scaled to its own number of prompts."
    )
    legend = el(
        "div",
        *_key("own", "belong to the route"),
        *_key("others", "belong to other routes"),
        *_key("outside", "belong to none"),
        *_key("line", "threshold in force"),
        *_key("line dashed", "best threshold") if found.calibration else (),
        class_="legend",
    )
    span = _span(found.histograms)
    panels = [_panel(histogram, span, found.calibration) for histogram in found.histograms]
    return [
        el("h2", "Scores"),
        el("p", about, class_="about"),
        legend,
        el("div", *panels, class_="panels"),
    ]


def _key(class_: str, text: str) -> tuple[Element]:
    return (el("span", el("i", class_=class_), text),)


def _span(histograms: Sequence[Histogram]) -> tuple[float, float]:
    """The scores between which there is anything to see in any of them."""
    edges = histograms[0].edges
    used = [
        bin_
        for bin_ in range(len(edges) - 1)
        if any(each.own[bin_] or each.others[bin_] or each.outside[bin_] for each in histograms)
    ]
    return edges[used[0]], edges[used[-1] + 1]


def _panel(
    histogram: Histogram, span: tuple[float, float], calibration: Calibration | None
) -> Element:
    shapes = {name: getattr(histogram, name) for name in ("outside", "others", "own")}
    peak = max(max(shares) for shares in shapes.values()) or 1.0
    chart = el(
        "svg",
        *(
            el("path", d=_outline(histogram.edges, shares, peak, span), class_=name)
            for name, shares in shapes.items()
            if any(shares)
        ),
        el("line", x1=_SIDE, x2=_WIDTH - _SIDE, y1=_BASE, y2=_BASE, class_="axis"),
        *_ticks(span),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"scores for {histogram.route}",
    )
    said = "its scores decided nothing"
    if calibration is not None:
        now = calibration.now.thresholds[histogram.route]
        best = calibration.chosen.thresholds[histogram.route]
        said = f"threshold {now:.3f}, best {best:.3f}"
        chart.append(_mark(now, span, "mark"))
        chart.append(_mark(best, span, "mark best"))
    return el("div", el("h3", histogram.route), el("p", said), chart, class_="panel card")


def _x(score: float, span: tuple[float, float]) -> float:
    low, high = span
    share = min(1.0, max(0.0, (score - low) / (high - low)))
    return round(_SIDE + share * (_WIDTH - 2 * _SIDE), 1)


def _outline(
    edges: Sequence[float], shares: Sequence[float], peak: float, span: tuple[float, float]
) -> str:
    """Steps as SVG path data, closed along the base line."""
    parts = []
    for left, right, share in zip(edges, edges[1:], shares, strict=False):
        if right > span[0] and left < span[1]:
            y = round(_BASE - share / peak * (_BASE - _TOP), 1)
            parts += [f"{_x(left, span)},{y}", f"{_x(right, span)},{y}"]
    return f"M{_x(span[0], span)},{_BASE} L{' '.join(parts)} {_x(span[1], span)},{_BASE} Z"


def _ticks(span: tuple[float, float]) -> Iterable[Element]:
    for number in range(-5, 6):
        score = number * _TICK
        if span[0] - 1e-9 <= score <= span[1] + 1e-9:
            x = min(max(_x(score, span), 12), _WIDTH - 12)
            yield el("text", f"{score:.1f}", x=x, y=_HEIGHT - 4)


def _mark(score: float, span: tuple[float, float], class_: str) -> Element:
    x = _x(score, span)
    return el("line", x1=x, x2=x, y1=4, y2=_BASE, class_=class_)


# --- thresholds ------------------------------------------------------------------------------------


def _calibration(found: Evaluation) -> list[Node]:
    heading = el("h2", "Thresholds")
    calibration = found.calibration
    if calibration is None:
        sentence = NOT_CALIBRATED[0].upper() + NOT_CALIBRATED[1:] + "."
        return [heading, el("p", sentence, class_="about")]
    about = (
        "Fitted so that the mean of two shares is largest: in-scope prompts that arrive at their "
        f"route, and prompts of no route that arrive at {found.default}. “On unseen” is that mean "
        f"when four fifths of the prompts choose for the fifth that is left ({FOLDS} folds): the figure "
        "to believe. --write-thresholds takes the line in blue. The curves show what one threshold for "
        "all routes trades; should one kind of mistake cost you more, set it by them."
    )
    fits = _fits(calibration)
    results = _table(
        ("", "in scope", "no route", "mean", "on unseen"),
        ((name, *_fit_cells(fit)) for name, fit in fits.items()),
        chosen=next(name for name, fit in fits.items() if fit is calibration.chosen),
    )
    legend = el(
        "div",
        *_key("own", "in scope, right"),
        *_key("outside", "no route, to the default"),
        *_key("line dashed", "best single threshold"),
        class_="legend",
    )
    curves = el("div", legend, _curves(calibration), class_="panel card")
    return [
        heading,
        el("p", about, class_="about"),
        el("div", results, curves, class_="pair"),
    ]


def _fits(calibration: Calibration) -> dict[str, Fit]:
    return {
        "in force": calibration.now,
        "one for all": calibration.one,
        "one per route": calibration.each,
    }


def _fit_cells(fit: Fit) -> Iterable[str]:
    return map(percent, (fit.in_scope, fit.out_of_scope, fit.balanced, fit.held_out))


def _curves(calibration: Calibration) -> Element:
    span = (0.0, 1.0)

    def curve(share: Callable[[Sweep], float], class_: str) -> Element:
        points = (
            f"{_x(point.threshold, span)},{_BASE - share(point) * (_BASE - _TOP):.1f}"
            for point in calibration.sweep
        )
        return el("polyline", points=" ".join(points), class_=f"curve {class_}")

    single = next(iter(calibration.one.thresholds.values()))
    return el(
        "svg",
        *_levels(),
        curve(lambda point: point.in_scope, "own"),
        curve(lambda point: point.out_of_scope, "outside"),
        _mark(single, span, "mark best"),
        *_ticks(span),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label="shares of prompts that arrive, from none below to all above, by threshold",
    )


def _levels() -> Iterable[Element]:
    for share, name in ((1.0, "100 %"), (0.5, "50 %"), (0.0, None)):
        y = _BASE - share * (_BASE - _TOP)
        yield el("line", x1=_SIDE, x2=_WIDTH - _SIDE, y1=y, y2=y, class_="axis")
        if name:
            yield el("text", name, x=_SIDE, y=y - 2, class_="level")


def _routes(found: Evaluation) -> list[Node]:
    about = (
        "Precision: of what went there, the share that belongs there. Recall: of what belongs there, "
        "the share that arrived. F1 is their harmonic mean. Then the thresholds."
    )
    fits = {} if found.calibration is None else _fits(found.calibration)
    rows = (
        (
            route.name,
            f"{route.prompts:,}",
            *map(percent, (route.precision, route.recall, route.f1)),
            *(_threshold(fit, route.name) for fit in fits.values()),
        )
        for route in found.routes
    )
    return [
        el("h2", "Routes"),
        el("p", about, class_="about"),
        _table(("route", "prompts", "precision", "recall", "F1", *fits), rows),
    ]


def _threshold(fit: Fit, route: str) -> str:
    return f"{fit.thresholds[route]:.3f}" if route in fit.thresholds else "–"


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, chosen: str | None = None
) -> Element:
    body = [
        el(
            "tr",
            el("th", name, scope="row"),
            *(el("td", cell) for cell in cells),
            class_="chosen" if name == chosen else None,
        )
        for name, *cells in rows
    ]
    head = el("tr", *(el("th", name, scope="col") for name in header))
    return el("div", el("table", el("thead", head), el("tbody", *body)), class_="card scroll")


# --- mistakes --------------------------------------------------------------------------------------


def _mistakes(found: Evaluation) -> list[Node]:
    if not found.mistakes:
        return [el("h2", "Mistakes"), el("p", "None.", class_="about")]
    about = (
        f"The {len(found.mistakes)} worst of {found.mistaken:,}, at most five of a kind, those first "
        "whose scores are furthest from the right decision. Often the label is what is wrong."
    )
    items = [_mistake(each) for each in found.mistakes]
    return [
        el("h2", "Worst mistakes"),
        el("p", about, class_="about"),
        el("ol", *items, class_="mistakes card"),
    ]


def _mistake(mistake: Mistake) -> Element:
    how = mistake.reason if mistake.matched is None else f"{mistake.reason} “{mistake.matched}”"
    threshold = "" if mistake.threshold is None else f", threshold {mistake.threshold:.3f}"
    return el(
        "li",
        el("p", mistake.text, class_="text", dir="auto"),
        el(
            "p",
            "belongs to ",
            el("b", mistake.expected),
            _score(mistake.expected_score),
            ", went to ",
            el("b", mistake.went_to),
            _score(mistake.went_to_score),
            f" ({how}{threshold})",
            class_="meta",
        ),
    )


def _score(score: float | None) -> str:
    return "" if score is None else f" {score:.3f}"
