"""Prometheus' own tools for tests: where they are, and why a test without them is skipped."""

import shutil
import subprocess
from pathlib import Path

import pytest

_TOOLS = Path(__file__).parents[1] / ".cache" / "tools"


def prometheus_tool(name: str) -> str:
    """The path of `promtool` or `prometheus`; else the test is skipped."""
    if (_TOOLS / name).exists():
        return str(_TOOLS / name)
    if found := shutil.which(name):
        return found
    pytest.skip(f"{name} is missing: it is in Debian's package prometheus, which .ci/run unpacks")


def promtool(*arguments: str | Path, stdin: str | None = None) -> str:
    """What it printed; fails with that where promtool fails."""
    done = subprocess.run(
        [prometheus_tool("promtool"), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
