"""The rendered bootstrap as a whole: the same bytes each time, no secret, every value as it was set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from extproc.envoyconf import bootstrap, render

Rendered = Any
Render = Callable[[str], Rendered]

ROUTES = """
[router]
default = "chat"
[[route]]
name = "code"
upstreams = ["fallback", "primary"]
[[route]]
name = "chat"
upstreams = ["primary", "fallback"]
"""


def test_same_config_gives_the_same_bytes_whatever_the_environment_holds(rendered: Render) -> None:
    built = rendered(ROUTES)
    with mock.patch.dict(os.environ, {"PRIMARY_API_KEY": "sk-very-secret"}):
        assert render(built.config) == built.text


def test_yaml_says_what_the_typed_messages_say(rendered: Render) -> None:
    built = rendered(ROUTES)
    messages = bootstrap(built.config).to_dict(casing=lambda name: name.rstrip("_"))
    assert built.tree == messages


def test_of_a_secret_only_the_name_of_its_variable_is_rendered(rendered: Render) -> None:
    text = rendered(ROUTES).text
    assert "%ENVIRONMENT(PRIMARY_API_KEY)%" in text
    assert text.count("PRIMARY_API_KEY") == text.count("%ENVIRONMENT(PRIMARY_API_KEY)%")


def test_every_cluster_that_is_named_exists(rendered: Render) -> None:
    built = rendered(ROUTES)
    clusters, listeners = built.clusters, built.listeners
    assert (
        set(re.findall(r"cluster(?:_name)?: (\S+)", built.text)) - {"pointsman"} <= clusters.keys()
    )
    assert set(re.findall(r"server_listener_name: (\S+)", built.text)) <= listeners.keys()
    for chain in built.config.chains():
        assert set(built.members(chain.name)) <= clusters.keys()
    resources = built.tree["static_resources"]
    assert len(clusters) == len(resources["clusters"])
    assert len(listeners) == len(resources["listeners"])


def evaluated(text: str) -> str:
    """What Envoy makes of a format string; an operator that we did not mean is an error."""

    def operator(found: re.Match[str]) -> str:
        return {"%%": "%", "%UNIQUE_ID%": "id", "%START_TIME(%s)%": "1700000000"}[found[0]]

    return re.sub(r"%%|%START_TIME\(%s\)%|%[^%]*%?", operator, text)


@pytest.mark.parametrize(
    "model", ["a%b", "%REQ(cookie)%", "100%", "it's", "{x}", "a:b", "#x", "org/m@1"]
)
def test_model_of_any_legal_spelling_survives(rendered: Render, model: str) -> None:
    built = rendered(f'[upstream.primary]\nbase_url = "http://127.0.0.1:1"\nmodel = "{model}"\n')
    for mapper in built.hcm("tier.primary")["local_reply_config"]["mappers"]:
        values = {
            each["header"]["key"]: each["header"]["value"] for each in mapper["headers_to_add"]
        }
        assert evaluated(values["x-pointsman-model"]) == model
    for listener in ("tier.primary", "ingress"):
        assert f'model_name = "{model}"' in built.script(listener)
