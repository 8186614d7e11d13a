"""`python -m extproc.observability`: writes every generated file of observability; it decides none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from extproc.observability import dashboard, page, rules

ROOT: Final = Path(__file__).parents[2]


def files() -> Mapping[Path, str]:
    """Every file, with what it must hold now."""
    chart = ROOT / "helm" / "pointsman" / "files"
    return {
        ROOT / "docs" / "observability.md": page.document(),
        ROOT / rules.RUNBOOKS / "README.md": rules.index(),
        chart / "rules.yaml": rules.document(),
        chart / "dashboard.json": dashboard.document(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
