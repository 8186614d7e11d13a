"""Fixtures of the chart's tests: both helms, and Kubernetes' schemas."""

import json
import subprocess
from pathlib import Path

import pytest
from chart_tools import HELMS, TOOLS, Helm, tool


@pytest.fixture(scope="session", params=list(HELMS))
def helm(request):
    return Helm(tool(HELMS[request.param]))


@pytest.fixture(scope="session")
def helm4():
    return Helm(tool(HELMS["4.3"]))


@pytest.fixture(scope="session")
def validate():
    """Manifests against the schemas of one Kubernetes version, with no unknown field let through."""
    tool("kubernetes-validate")
    python = TOOLS / "venv" / "bin" / "python"
    script = Path(__file__).with_name("kubernetes_schemas.py")
    with subprocess.Popen(
        [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(text: str, version: str) -> None:
            process.stdin.write(json.dumps([text, version]) + "\n")
            process.stdin.flush()
            said = json.loads(process.stdout.readline())
            assert said == "", said

        yield run
        process.stdin.close()
