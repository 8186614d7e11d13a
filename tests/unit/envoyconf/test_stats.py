"""What is rendered of Envoy's own metrics: labels for any names, and a listener only if asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from extproc.config import parse
from extproc.envoyconf import parts, stats

Rendered = Any
Render = Callable[[str], Rendered]

DOTTED = "".join(
    f'[upstream."{name}"]\nbase_url = "http://127.0.0.1:1"\nmodel = "{name}"\n'
    for name in ("a", "a.b", "a.b-c")
)


def labelled(stat: str, tags: list[dict[str, str]]) -> tuple[str, dict[str, str]]:
    """As Envoy does it: the outer group leaves the name, the inner one is the value."""
    labels = {}
    for tag in tags:
        if found := re.match(tag["regex"], stat):
            labels[tag["tag_name"]] = found[2]
            stat = stat[: found.start(1)] + stat[found.end(1) :]
    return stat, labels


def test_upstreams_and_chains_become_labels_whatever_dots_they_hold(rendered: Render) -> None:
    tags = rendered(DOTTED).tree["stats_config"]["stats_tags"]
    for upstream in ("a", "a.b", "a.b-c", "@rule"):
        for scope in ("cluster.hosts", "cluster.tier", "http.tier", "listener.envoy_internal_tier"):
            found = labelled(f"{scope}.{upstream}.upstream_rq_total", tags)
            assert found == (f"{scope}.upstream_rq_total", {"pointsman_upstream": upstream})
    stat, labels = labelled("cluster.chain.upstream.a.b.upstream_rq_total", tags)
    assert (stat, labels) == (
        "cluster.chain.upstream_rq_total",
        {"pointsman_chain": "upstream.a.b"},
    )
    assert labelled("cluster.extproc.upstream_rq_total", tags)[1] == {}


def test_no_expression_is_longer_than_envoy_allows() -> None:
    names = [f"an-upstream-with-a-long-name.{number}" for number in range(100)]
    tables = "".join(
        f'[upstream."{name}"]\nbase_url = "http://127.0.0.1:1"\nmodel = "m-{name}"\n'
        for name in names
    )
    # Not the whole bootstrap: of a hundred upstreams it takes ten seconds.
    config = parse(tables, file="test.toml", environ=None)
    tags: Any = parts.plain(stats.labels(config))["stats_tags"]
    assert all(len(tag["regex"]) <= 1024 for tag in tags)
    for name in names:
        assert labelled(f"cluster.hosts.{name}.x", tags)[1] == {"pointsman_upstream": name}


def test_listener_is_off_by_default(rendered: Render) -> None:
    built = rendered(DOTTED)
    assert "stats" not in built.listeners
    assert "admin" not in built.clusters


def test_listener_reaches_admin_where_it_listens(rendered: Render) -> None:
    built = rendered(
        '[metrics]\nenvoy_listen = "10.0.0.1:9466"\n[admin]\nlisten = ":9902"\n' + DOTTED
    )
    address = built.listener("stats")["address"]["socket_address"]
    assert address == {"address": "10.0.0.1", "port_value": 9466}
    (endpoint,) = built.cluster("admin")["load_assignment"]["endpoints"][0]["lb_endpoints"]
    admin = endpoint["endpoint"]["address"]["socket_address"]
    assert admin == {"address": "127.0.0.1", "port_value": 9902}
