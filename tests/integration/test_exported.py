"""A model with a tokenizer.json through the commands and the worker processes, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_model import TinyOriginal

from extproc.embedding.export import export

CONFIG = """
[upstream.x]
base_url = "http://x.example"
model = "m"
[router]
default = "chat"
workers = 1
[router.encoder]
path = "{path}"
[[route]]
name = "code"
upstreams = ["x"]
utterances = ["write a python function", "a function to write"]
[[route]]
name = "chat"
upstreams = ["x"]
utterances = ["hello world", "how is you"]
"""


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "tiny"
    export(
        TinyOriginal(), out, source="tiny", made_by="x", precision="int8", progress=lambda _: None
    )
    (tmp_path / "pointsman.toml").write_text(CONFIG.format(path=out), encoding="utf-8")
    return out


def route(folder, text):
    command = ["-m", "extproc.cli", "route", text, "--json", "--config"]
    return subprocess.run(
        [sys.executable, *command, folder.with_name("pointsman.toml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_prompts_are_routed_by_it_and_the_thresholds_are_told_to_be_an_estimate(folder):
    done = route(folder, "write a python function")
    assert done.returncode == 0, done.stderr
    explained = json.loads(done.stdout)
    assert explained["route"] == "code"
    assert explained["scores"]["code"]["score"] > 0.9
    assert done.stderr.count("those of code, chat are an estimate") == 1


def test_torn_file_ends_the_start_with_its_name(folder):
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    done = route(folder, "hello")
    assert done.returncode == 1
    assert f"{path}: not the file that pointsman.json was written for" in done.stderr
