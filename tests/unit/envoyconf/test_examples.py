"""envoy/examples holds what `pointsman render` gives now: rendered files are never edited by hand."""

from pathlib import Path

import pytest

from extproc.config import load
from extproc.envoyconf import render

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "envoy" / "examples"
CONFIGS = {
    "article.yaml": "tests/data/config/article.toml",
    "demo.yaml": "extproc/demo/demo.toml",
}

BY_HAND = {"external.yaml"}
"""An Envoy that is not ours; tests/integration/test_foreign.py runs it."""


@pytest.mark.parametrize("example", CONFIGS)
def test_example_is_what_render_gives(example):
    rendered = render(load(ROOT / CONFIGS[example], environ=None))
    # No assert on the texts themselves: pytest would take minutes over the difference.
    is_current = (EXAMPLES / example).read_text(encoding="utf-8") == rendered
    assert is_current, f"envoy/examples/{example} is stale: run `make examples` and commit it"


def test_every_example_is_compared():
    assert {path.name for path in EXAMPLES.iterdir()} == CONFIGS.keys() | BY_HAND
