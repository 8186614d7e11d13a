"""docs/observability.md is what the code says now, and leaves nothing out."""

from __future__ import annotations

from pathlib import Path

from extproc.app import observability

DOC = Path(__file__).parents[3] / "docs" / "observability.md"


def test_document_is_current() -> None:
    is_current = DOC.read_text(encoding="utf-8") == observability.document()
    assert is_current, "docs/observability.md is stale: run `make observability` and commit it"


def test_every_label_has_its_values_told() -> None:
    labels = {
        label.strip("` ")
        for row in observability._metrics()
        for label in row[2].split(",")
        if label
    }
    told = {label for row in observability._LABELS for label in row[0].split(", ")}
    assert labels == told
