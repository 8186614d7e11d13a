"""What a process does not load: torch nowhere, and Envoy's typed messages not in the sidecar."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import extproc
from extproc.embedding.model import default_cache_dir, ensure_model

FORBIDDEN = {"torch", "transformers", "sentence_transformers"}

RUN_WITHOUT = """
import importlib, pkgutil, sys

class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            asked.append(name)
            raise ModuleNotFoundError(name)

asked = []
sys.meta_path.insert(0, Refuse)

import extproc.embedding
for module in pkgutil.iter_modules(extproc.embedding.__path__, "extproc.embedding."):
    importlib.import_module(module.name)

from pathlib import Path
from extproc.embedding.encoder import Encoder
from extproc.embedding.model import ModelFiles
files = ModelFiles(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "")
print(Encoder(files).encode("hello, 世界").shape, asked)
"""


def test_runtime_encodes_where_torch_cannot_be_imported():
    files = ensure_model(None, cache_dir=default_cache_dir(os.environ), progress=print)
    arguments = [str(files.onnx), str(files.tokenizer), str(files.dimension)]
    code = RUN_WITHOUT.replace("{forbidden!r}", repr(FORBIDDEN))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 512) []"


def test_sidecar_starts_without_envoys_typed_messages():
    """They are half of the work of a start; whoever renders Envoy's files needs them."""
    code = "import sys, extproc.app.serve; print('envoy_data_plane' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


MODULES = sorted(Path(extproc.__file__).parent.rglob("*.py"))


EXPORTER = "extproc.embedding.original"
"""Imports torch when an export asks for it, and no module imports it but the one for that command."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_imports_torch(path):
    named: set[str] = set()
    module = ".".join(path.relative_to(Path(extproc.__file__).parents[1]).with_suffix("").parts)
    tree = ast.parse(path.read_text())
    for node in tree.body if module == EXPORTER else ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(node.module or "")
    assert not FORBIDDEN & {name.partition(".")[0] for name in named}
    assert EXPORTER not in named or module == "extproc.app.export"
