"""Fixtures of the chart's tests: both helms, and Kubernetes' schemas."""

import json
import shutil
import subprocess
import tempfile
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


@pytest.fixture(scope="session")
def check_types():
    """Manifests against the types that npm packages make of CRDs; an unknown field is an error."""
    folder = TOOLS / "crds"
    if not (folder / ".installed").exists() or shutil.which("node") is None:
        pytest.skip("the types of CRDs are missing: install npm, then run `make test-chart`")

    def run(manifests: list[dict], packages: dict[str, str]) -> None:
        """`packages`: by the start of an apiVersion, the package that has its kinds."""
        lines, checked = [], 0
        for each in manifests:
            group = each["apiVersion"].partition("/")[0]
            if group in packages:
                module = f"{packages[group]}/{each['apiVersion']}/{each['kind']}"
                kind = f"I{each['kind']}"
                lines.append(f'import type {{{kind} as T{checked}}} from "{module}";')
                lines.append(f"export const m{checked}: T{checked} = {json.dumps(each)};")
                checked += 1
        assert checked
        with tempfile.NamedTemporaryFile("w", suffix=".ts", dir=folder, encoding="utf-8") as file:
            file.write("\n".join(lines))
            file.flush()
            compiler = folder / "node_modules" / "typescript" / "bin" / "tsc"
            options = (
                "--noEmit --skipLibCheck --strict --module nodenext --moduleResolution nodenext"
            )
            done = subprocess.run(
                ["node", str(compiler), *options.split(), file.name],
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
            )
        assert done.returncode == 0, done.stdout + done.stderr

    return run
