"""Fixtures of the chart's tests: both helms, and Kubernetes' schemas."""

import subprocess
import tempfile

import pytest
from chart_tools import HELMS, Helm, tool


@pytest.fixture(scope="session", params=list(HELMS))
def helm(request):
    return Helm(tool(HELMS[request.param]))


@pytest.fixture(scope="session")
def helm4():
    return Helm(tool(HELMS["4.3"]))


@pytest.fixture(scope="session")
def validate():
    """Manifests against the schemas of one Kubernetes version, with no unknown field let through."""
    binary = tool("kubernetes-validate")

    def run(text: str, version: str) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            done = subprocess.run(
                [binary, "-k", version, "--strict", file.name],
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stdout + done.stderr

    return run
