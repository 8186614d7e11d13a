"""Which upstreams a chain tries, in which order, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Render = Callable[[str], Any]

THREE = "".join(
    f'[upstream.{name}]\nbase_url = "http://127.0.0.1:{port}"\nmodel = "m"\n'
    for name, port in (("a", 1), ("b", 2), ("c", 3))
)
ROUTES = """
[router]
default = "main"
[[route]]
name = "other"
upstreams = ["c", "a"]
[[route]]
name = "main"
upstreams = ["a", "b"]
"""
RULE = "tier.@rule"


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


@pytest.mark.parametrize(
    ("mode", "main", "other", "explicit"),
    [
        (
            "model_then_rule",
            ["tier.a", "tier.b", RULE],
            ["tier.c", "tier.a", RULE],
            ["tier.b", RULE],
        ),
        ("model_only", ["tier.a", "tier.b"], ["tier.c", "tier.a"], ["tier.b"]),
        ("rule_only", ["tier.a", RULE], ["tier.c", RULE], ["tier.b", RULE]),
        ("none", ["tier.a"], ["tier.c"], ["tier.b"]),
    ],
)
def test_members_follow_the_mode(
    rendered: Render, mode: str, main: list[str], other: list[str], explicit: list[str]
) -> None:
    built = rendered(THREE + ROUTES + f'[fallback]\nmode = "{mode}"')
    assert built.members("route.main") == main
    assert built.members("route.other") == other
    assert built.members("upstream.b") == explicit
    assert (RULE in built.clusters) == (RULE in built.listeners) == (RULE in main)
    for chain in built.config.chains():
        route = next(each for each in built.routes("ingress") if each["name"] == chain.name)
        retries = route["route"]["retry_policy"].get("num_retries", 0)
        assert retries == len(built.members(chain.name)) - 1


def test_members_in_lua_stand_in_the_order_of_the_cluster(rendered: Render) -> None:
    built = rendered(THREE + ROUTES)
    filters = built.cluster("chain.route.other")["typed_extension_protocol_options"]
    assert 'members = ",c,a,rule,"' in str(filters)


def test_explicit_upstream_is_followed_by_those_behind_it_in_the_default_route(
    rendered: Render,
) -> None:
    built = rendered(THREE + ROUTES)
    assert built.members("upstream.a") == ["tier.a", "tier.b", RULE]
    assert built.members("upstream.c") == ["tier.c", "tier.a", RULE]


def test_default_route_takes_what_names_no_chain_and_comes_last(rendered: Render) -> None:
    built = rendered(THREE + ROUTES)
    *named, last = built.routes("ingress")
    assert last["match"] == {"prefix": "/"}
    assert last["route"]["cluster"] == "chain.route.main"
    for route in named[1:]:
        (header,) = route["match"]["headers"]
        assert header["name"] == "x-pointsman-chain"
        assert route["route"]["cluster"] == f"chain.{header['string_match']['exact']}"


@pytest.mark.parametrize(
    "more",
    [
        "",
        "[retry]\nmax_retries = 0",
        '[retry]\nmax_retries = 5\nmax = "20s"',
        '[server]\nwrite_timeout = "1s"',
        '[server]\nwrite_timeout = "10m"',
        '[router]\ndeadline = "5s"\ndefault = "default"',
    ],
)
def test_each_limit_is_longer_than_those_inside_it(rendered: Render, more: str) -> None:
    built = rendered(THREE.replace('model = "m"', 'model = "m"\ninference_timeout = "7s"') + more)
    config = built.config
    visits = [config.visit_limit_s(each) for each in config.upstreams.values()]
    tries = config.retry.max_retries + 1
    for upstream in config.upstreams.values():
        assert config.visit_limit_s(upstream) >= tries * upstream.inference_timeout_s
        for route in built.routes(f"tier.{upstream.id}"):
            if "route" in route:
                idle = seconds(route["route"]["idle_timeout"])
                assert idle > config.visit_limit_s(upstream)
                assert idle >= config.server.write_timeout_s
                assert seconds(route["route"]["timeout"]) == 0
                per_try = route["route"]["retry_policy"]["per_try_timeout"]
                assert seconds(per_try) == upstream.inference_timeout_s
    for route in built.routes("ingress")[1:]:
        chain = next(each for each in config.chains() if each.name == route["name"])
        inside = [config.visit_limit_s(config.upstreams[each]) for each in chain.upstreams]
        assert seconds(route["route"]["idle_timeout"]) > sum(inside)
        assert seconds(route["route"]["retry_policy"]["per_try_timeout"]) > max(inside)
    assert max(visits) < 24 * 3600


@pytest.mark.parametrize("deadline", ["1ms", "150ms", "2s"])
def test_envoy_waits_longer_for_the_sidecar_than_the_sidecar_for_its_model(
    rendered: Render, deadline: str
) -> None:
    built = rendered(f'[router]\ndefault = "default"\ndeadline = "{deadline}"')
    (ext_proc,) = [each for each in built.filters("ingress") if each["name"] == "ext_proc"]
    timeout = ext_proc["typed_config"]["message_timeout"]
    assert seconds(timeout) >= built.config.router.deadline_s + 0.1
    assert ext_proc["typed_config"]["failure_mode_allow"] is True


def test_ingress_strips_decides_and_routes_in_that_order(rendered: Render) -> None:
    built = rendered("")
    assert [each["name"] for each in built.filters("ingress")] == [
        "admitted", "gunzip", "ext_proc", "ingress", "envoy.filters.http.router",
    ]  # fmt: skip
    (strip,) = built.hcm("ingress")["early_header_mutation_extensions"]
    prefixes = [
        each["remove_on_match"]["key_matcher"]["prefix"]
        for each in strip["typed_config"]["mutations"]
    ]
    assert prefixes == ["x-pointsman-", "x-envoy-"]


def test_whole_request_is_limited_only_where_configured(rendered: Render) -> None:
    assert {r["route"]["timeout"] for r in rendered("").routes("ingress")[1:]} == {"0s"}
    limited = rendered('[server]\nrequest_timeout = "90s"').routes("ingress")[1:]
    assert {each["route"]["timeout"] for each in limited} == {"90s"}


def test_body_limit_is_set_wherever_a_body_may_wait(rendered: Render) -> None:
    built = rendered('[server]\nmax_body = "3MiB"')
    size = 3 * 1024 * 1024 + 64 * 1024  # room for the name of a model
    for listener in built.listeners:
        for route in built.routes(listener):
            assert route["request_body_buffer_limit"] == size, route["match"]
