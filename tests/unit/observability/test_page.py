"""The page leaves no label out."""

from __future__ import annotations

from extproc.observability import page


def test_every_label_has_its_values_told() -> None:
    labels = {label.strip("` ") for row in page._metrics() for label in row[2].split(",") if label}
    told = {label for row in page._LABELS for label in row[0].split(", ")}
    assert labels == told
