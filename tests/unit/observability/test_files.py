"""What is made from the code is what the code says now."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="the extra `dashboard` builds the dashboard")

from extproc.observability.__main__ import files


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_file_is_current(path: Path) -> None:
    is_current = path.read_text(encoding="utf-8") == files()[path]
    assert is_current, f"{path} is stale: run `make observability` and commit it"
