"""What the chart's tests share: Helm, tools and why a test without one is skipped, rendered manifests."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "pointsman"
TOOLS = ROOT / ".cache" / "tools"
HELMS = {"3.17": "helm-3.17", "4.3": "helm-4.3"}


def tool(name: str) -> str:
    """The path of a tool that tools.py installs, or of the machine's own; else the test is skipped."""
    for folder in (TOOLS, TOOLS / "venv" / "bin", TOOLS / "checkov" / "bin"):
        if (folder / name).is_file():
            return str(folder / name)
    if found := shutil.which(name):
        return found
    pytest.skip(f"{name} is missing: run `make test-chart`, which installs it")


class Helm:
    def __init__(self, binary: str) -> None:
        self._binary = binary

    def run(self, *arguments: str, values: object = None) -> subprocess.CompletedProcess:
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            if values is not None:
                json.dump(values, file, ensure_ascii=False)
                file.flush()
                arguments = (*arguments, "-f", file.name)
            return subprocess.run(
                [self._binary, *arguments],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "HELM_CACHE_HOME": tempfile.gettempdir()},
            )

    def template(self, *arguments: str, values: object = None, chart: Path = CHART) -> str:
        done = self.run("template", "gw", str(chart), *arguments, values=values)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def manifests(self, *arguments: str, values: object = None, chart: Path = CHART) -> list[dict]:
        text = self.template(*arguments, values=values, chart=chart)
        return [each for each in yaml.safe_load_all(text) if each]

    def refusal(self, values: object, *arguments: str) -> str:
        done = self.run("template", "gw", str(CHART), *arguments, values=values)
        assert done.returncode != 0, done.stdout
        return done.stderr


def only(manifests: list[dict], kind: str) -> dict:
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


def values_of(name: str) -> dict:
    return yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text(encoding="utf-8"))
