"""What `pointsman route` shows of rules, decided for real where no model is needed."""

from __future__ import annotations

import asyncio

import pytest

from extproc.app.explain import as_text, explain
from extproc.cli import main
from extproc.config import parse
from extproc.core.errors import Content

RULES = """
[upstream.big]
base_url = "http://x.example"
model = "big"
[[route]]
name = "code"
upstreams = ["big"]
keywords = ["traceback"]
patterns = ['^SELECT']
[[route]]
name = "vision"
upstreams = ["big"]
has = ["images"]
headers = { "x-team" = "vision" }
priority = 5
[[route]]
name = "default"
upstreams = ["big"]
"""


def told(text, **more):
    config = parse(RULES, file="x", environ=None)
    return asyncio.run(explain(config, text, progress=print, **more))


def test_every_rule_is_shown_in_its_order_with_what_matched():
    explained = told("SELECT a traceback", headers=[("x-team", "vision")])
    assert (explained["route"], explained["reason"]) == ("vision", "header")
    assert as_text(explained).splitlines()[:10] == [
        "route     vision",
        "because   header: x-team = vision",
        "model     big",
        "upstreams big",
        "",
        "RULE     ROUTE   PRIORITY  MATCHED",
        "header   vision         5  x-team = vision",
        "content  vision         5  -",
        "keyword  code           0  traceback",
        "pattern  code           0  ^SELECT",
    ]


def test_what_the_request_holds_can_be_said():
    assert told("hi", has=[Content.IMAGES])["matched"] == "images"
    assert told("hi", has=[Content.TOOLS])["reason"] == "default"


def test_without_rules_there_is_no_table():
    config = parse(RULES[: RULES.index("[[route]]")], file="x", environ=None)
    explained = asyncio.run(explain(config, "hi", progress=print))
    assert "RULE" not in as_text(explained)


def test_command_passes_headers_and_contents_on(tmp_path, capsys):
    file = tmp_path / "c.toml"
    file.write_text(RULES)
    assert main(["route", "hi", "--config", str(file), "--header", "X-Team=vision"]) == 0
    assert "header: x-team = vision" in capsys.readouterr().out
    assert main(["route", "hi", "--config", str(file), "--has", "images"]) == 0
    assert "content: images" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["x-team", "=data"])
def test_header_without_name_or_value_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        main(["route", "hi", "--header", given])
    assert "is not NAME=VALUE" in capsys.readouterr().err
