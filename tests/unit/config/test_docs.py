"""docs/configuration.md against the reader: same keys, same defaults, and an example that loads."""

import re
import tomllib
from pathlib import Path

import pytest

from extproc.config import ConfigError, parse
from extproc.config.load import known_keys

DOC = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
ENVIRON = {"PRIMARY_API_KEY": "p", "FALLBACK_API_KEY": "f", "EMBEDDINGS_API_KEY": "e"}
UPSTREAM = '[upstream.x]\nbase_url = "http://x.example"\nmodel = "m"\n'
SERVICE = '[router.encoder]\nurl = "http://x.example/v1/embeddings"\n'
ROUTE = '[[route]]\nname = "default"\nupstreams = ["x"]\n'


def sections():
    for section in DOC.split("\n### ")[1:]:
        label = re.match(r"`(.*)`", section)[1]
        rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| .+ \|$", section, re.MULTILINE)
        yield label, rows


def examples():
    return re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)


def test_every_key_of_the_reader_is_documented_and_no_other():
    documented = {label: {key for key, _ in rows} for label, rows in sections()}
    known = {label: set(keys) for label, keys in known_keys().items() if label}
    for table in ("router.encoder", "server.tls", "server.auth", "extproc.tls"):
        outer, inner = table.split(".")
        known[f"[{outer}]"].remove(inner)  # a table of its own
    assert documented == known


def defaults():
    return [
        pytest.param(label, key, cell.strip("`"), id=f"{label} {key}")
        for label, rows in sections()
        for key, cell in rows
        if cell.startswith("`")
    ]


@pytest.mark.parametrize(("label", "key", "default"), defaults())
def test_documented_default_is_the_default(label, key, default):
    given = f"{key} = {default}\n"
    if label == "[upstream.ID]":
        without, with_default = UPSTREAM, UPSTREAM + given
    elif label == "[[route]]":
        without, with_default = UPSTREAM + ROUTE, UPSTREAM + ROUTE + given
    elif label == "[router.encoder]":
        without, with_default = UPSTREAM + SERVICE, UPSTREAM + SERVICE + given
    elif label == "[server.tls]":
        without = f'{UPSTREAM}{label}\ncert_file = "/c"\nkey_file = "/k"\n'
        with_default = without + given
    else:
        without, with_default = UPSTREAM, f"{label}\n{given}{UPSTREAM}"
    assert parse(with_default, file="x", environ={}) == parse(without, file="x", environ={})


def test_keys_without_a_literal_default_are_these():
    cells = {(key, cell) for _, rows in sections() for key, cell in rows if cell[0] != "`"}
    assert cells == {
        ("name", "the id"),
        ("name", "required"),
        ("base_url", "required"),
        ("model", "required"),
        ("model", "none"),
        ("url", "none"),
        ("dimensions", "none"),
        ("upstreams", "required"),
        ("api_key_env", "none"),
        ("api_key_file", "none"),
        ("ca_file", "none"),
        ("cert_file", "required"),
        ("key_file", "required"),
        ("client_ca_file", "none"),
        ("keys_file", "required"),
        ("path", "none"),
        ("endpoint", "none"),
        ("listen", "none"),
        ("envoy_listen", "none"),
        ("cert_file", "required"),
        ("key_file", "required"),
        ("client_ca_file", "none"),
        ("first_token_timeout", "none"),
        ("threshold", "none"),
        ("min_chars", "none"),
        ("max_chars", "none"),
    }


@pytest.mark.parametrize("example", examples())
def test_example_loads(example):
    parse(example, file="docs/configuration.md", environ=ENVIRON)


def test_full_example_has_every_key():
    *_, ours, others = examples()
    # What is for another Envoy only stands in an example of its own.
    full = tomllib.loads(ours)
    full["extproc"] |= tomllib.loads(others)["extproc"]
    for label, keys in known_keys().items():
        match label:
            case "":
                there = full.keys()
            case "[upstream.ID]":
                # api_key_env and api_key_file exclude each other.
                there = {key for upstream in full["upstream"].values() for key in upstream}
            case "[[route]]":
                there = full["route"][0].keys()
            case "[router.encoder]":  # path excludes the others, which have an example of their own
                (service,) = (each for each in examples() if "/v1/embeddings" in each)
                there = {*full["router"]["encoder"], *tomllib.loads(service)["router"]["encoder"]}
            case "[server.tls]" | "[server.auth]" | "[extproc.tls]":
                table, inner = label[1:-1].split(".")
                there = full[table][inner].keys()
            case _:
                there = full[label[1:-1]].keys()
        assert set(keys) == set(there), label


def test_faults_shown_in_the_introduction_are_real():
    shown = re.search(r"```\n(config\.toml:.*?)```", DOC, re.DOTALL)[1]
    text = f"""# 1
# 2
[server]
read_timeot = "10s"
{UPSTREAM}
[upstream.fallback]
base_url = "http://x.example"
model = "m"

[[route]]
name = "default"
upstreams = ["x", "fallbak"]
"""
    with pytest.raises(ConfigError) as caught:
        parse(text, file="config.toml", environ={})
    assert f"{caught.value}\n" == shown
