"""Scripted upstreams for the demo, the drill and the tests, and the demo's config; it knows no gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.config.model import Upstream

DEMO_CONFIG: Final = Path(__file__).with_name("demo.toml")


def demo_argv(upstreams: Iterable[Upstream]) -> tuple[str, ...]:
    """The command that serves every upstream of a config, each at its own `base_url`, in one process."""
    listens = []
    for upstream in upstreams:
        host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
        listens += ["--listen", f"{host}:{upstream.port}={upstream.id}"]
    return (sys.executable, "-m", "extproc.demo", *listens)
