"""Rendered bootstraps as Envoy would read them: plain data behind a few names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import pytest
import yaml

from extproc.config import Config, parse
from extproc.envoyconf import bootstrap, render

TWO_UPSTREAMS = """
[upstream.primary]
name = "vllm-primary"
base_url = "https://llm.example/api"
api_key_env = "PRIMARY_API_KEY"
model = "primary-model"
inference_timeout = "5s"

[upstream.fallback]
name = "vllm-fallback"
base_url = "http://127.0.0.1:9000"
model = "fallback-model"
inference_timeout = "8s"
"""


class Rendered:
    """One bootstrap; what of it is read becomes plain data, for the whole takes half a second."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._resources = bootstrap(config).static_resources
        self.listeners = {each.name: each for each in self._resources.listeners}
        self.clusters = {each.name: each for each in self._resources.clusters}
        self._plain: dict[int, dict[str, Any]] = {}

    @cached_property
    def text(self) -> str:
        return render(self.config)

    @cached_property
    def tree(self) -> dict[str, Any]:
        return dict(yaml.load(self.text, Loader=yaml.CSafeLoader))

    def plain(self, message: Any) -> dict[str, Any]:
        """A message under the names of its fields, as it is rendered."""
        if id(message) not in self._plain:
            self._plain[id(message)] = message.to_dict(casing=lambda name: name.rstrip("_"))
        return self._plain[id(message)]

    def listener(self, name: str) -> dict[str, Any]:
        return self.plain(self.listeners[name])

    def cluster(self, name: str) -> dict[str, Any]:
        return self.plain(self.clusters[name])

    def hcm(self, name: str) -> dict[str, Any]:
        (chain,) = self.listener(name)["filter_chains"]
        (manager,) = chain["filters"]
        return dict(manager["typed_config"])

    def filters(self, name: str) -> list[dict[str, Any]]:
        return list(self.hcm(name)["http_filters"])

    def routes(self, name: str) -> list[dict[str, Any]]:
        (host,) = self.hcm(name)["route_config"]["virtual_hosts"]
        return list(host["routes"])

    def members(self, chain: str) -> list[str]:
        return list(self.cluster(f"chain.{chain}")["cluster_type"]["typed_config"]["clusters"])

    def script(self, owner: str) -> str:
        """The Lua of a listener's filters, or of a chain's cluster."""
        tree = self.filters(owner) if owner in self.listeners else self.cluster(owner)
        (text,) = [text for text in strings(tree) if "envoy_on_request" in text]
        return text


def strings(tree: Any) -> list[str]:
    """Every string value of a tree."""
    if isinstance(tree, dict):
        return [text for each in tree.values() for text in strings(each)]
    if isinstance(tree, list):
        return [text for each in tree for text in strings(each)]
    return [tree] if isinstance(tree, str) else []


@pytest.fixture(scope="session")
def rendered() -> Callable[[str], Rendered]:
    """TOML in; two upstreams are there already where it names none."""

    @cache
    def build(text: str = "") -> Rendered:
        whole = text if "[upstream." in text else TWO_UPSTREAMS + text
        return Rendered(parse(whole, file="test.toml", environ=None))

    return build


@pytest.fixture(scope="session")
def rendered_config() -> Callable[[Config], Rendered]:
    return Rendered
