"""One upstream's tier: where a client's path ends up, what is forwarded, what is retried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from extproc.core import wire_names

Render = Callable[[str], Any]


def one(base_url: str, more: str = "") -> str:
    return f'[upstream.a]\nbase_url = "{base_url}"\nmodel = "m"\n{more}\n'


def forwarded(built: Any, path: str, headers: dict[str, str] | None = None) -> str:
    """The path that reaches the provider, by Envoy's rules for matching and rewriting a prefix."""
    for route in built.routes("tier.a"):
        match = route["match"]
        if any(each["name"] not in (headers or {}) for each in match.get("headers", [])):
            continue
        bare = path.partition("?")[0]
        if "path_separated_prefix" in match:
            prefix = match["path_separated_prefix"]
            if bare != prefix and not bare.startswith(prefix + "/"):
                continue
        else:
            prefix = match["prefix"]
            if not bare.startswith(prefix):
                continue
        rewrite = route["route"].get("prefix_rewrite", "")
        return rewrite + path[len(prefix) :] if rewrite else path
    raise AssertionError(path)


@pytest.mark.parametrize(
    ("base", "path", "expected"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/", "/v1/models", "/v1/models"),
        ("/v1", "/v1/models", "/v1/models"),
        ("/v1/", "/v1/models", "/v1/models"),
        ("/v1", "/models", "/v1/models"),
        ("/v1", "/v1", "/v1"),
        ("/v1", "/v1beta/models", "/v1/v1beta/models"),
        ("/v1", "/", "/v1/"),
        ("/v1", "/v1/models?a=/v1", "/v1/models?a=/v1"),
        ("/openai/v1", "/v1/models", "/openai/v1/models"),
        ("/openai/v1", "/openai/v1/models", "/openai/v1/models"),
        ("/openai/v1", "/x", "/openai/v1/x"),
        ("/openai/v1", "/openai/x", "/openai/v1/openai/x"),
        ("/openai/v1", "/v1?x", "/openai/v1?x"),
        ("/api", "/api/v1/generate", "/api/v1/generate"),
        ("/api", "/v1/chat/completions", "/api/v1/chat/completions"),
        ("/v1/v1", "/v1/models", "/v1/v1/models"),
        ("/v1/v1", "/v1/v1/models", "/v1/v1/models"),
        ("/a/b/c", "/b/c/x", "/a/b/c/x"),
        ("/a/b/c", "/c/x", "/a/b/c/x"),
        ("/a/b/c", "/c", "/a/b/c"),
    ],
)
def test_client_path_is_joined_to_the_base_with_what_they_share_once(
    rendered: Render, base: str, path: str, expected: str
) -> None:
    assert forwarded(rendered(one("https://llm.example" + base)), path) == expected


def test_watched_requests_are_joined_like_all_others(rendered: Render) -> None:
    built = rendered(one("https://llm.example/openai/v1", 'first_token_timeout = "2s"'))
    watched = {"x-pointsman-watch": "1"}
    for path in ("/v1/models", "/openai/v1/models", "/x"):
        assert forwarded(built, path, watched) == forwarded(built, path)


def live_routes(built: Any, name: str = "tier.a") -> list[dict[str, Any]]:
    return [each for each in built.routes(name) if "route" in each]


def test_skipped_upstream_answers_before_anything_else(rendered: Render) -> None:
    skip = rendered(one("https://llm.example")).routes("tier.a")[0]
    (header,) = skip["match"]["headers"]
    assert (header["name"], header["string_match"]) == ("x-pointsman-skip", {"contains": ",a,"})
    assert 400 <= skip["direct_response"]["status"] < 500  # outlier detection counts 5xx
    labels = [each["header"] for each in skip["response_headers_to_add"]]
    assert {"key": "x-pointsman-fail", "value": "circuit_open"} in labels


def test_key_of_our_own_replaces_those_of_the_client(rendered: Render) -> None:
    built = rendered(one("https://llm.example", 'api_key_env = "KEY_A"'))
    for route in live_routes(built):
        (added,) = route["request_headers_to_add"]
        assert added["header"] == {"key": "authorization", "value": "Bearer %ENVIRONMENT(KEY_A)%"}
        assert added["append_action"] == "OVERWRITE_IF_EXISTS_OR_ADD"
        assert {"x-api-key", "api-key"} <= set(route["request_headers_to_remove"])


def test_without_a_key_of_ours_the_clients_own_goes_through(rendered: Render) -> None:
    for route in live_routes(rendered(one("https://llm.example"))):
        assert "request_headers_to_add" not in route
        assert not {"authorization", "x-api-key"} & set(route["request_headers_to_remove"])


def test_of_our_headers_only_the_model_reaches_a_provider(rendered: Render) -> None:
    answers = {wire_names.FAIL, wire_names.STATUS}  # these travel the other way
    headers = {
        value
        for value in vars(wire_names).values()
        if isinstance(value, str) and value.startswith(wire_names.PREFIX)
    }
    hidden = headers - answers - {wire_names.PREFIX, wire_names.MODEL}
    for route in live_routes(rendered(one("https://llm.example"))):
        removed = set(route["request_headers_to_remove"])
        assert hidden <= removed
        assert wire_names.MODEL not in removed
        assert {"cookie", "accept-encoding", "x-forwarded-for"} <= removed


def test_provider_cannot_speak_in_our_name(rendered: Render) -> None:
    for route in live_routes(rendered(one("https://llm.example"))):
        assert set(route["response_headers_to_remove"]) >= {
            "x-pointsman-fail", "x-pointsman-status", "x-pointsman-attempts",
            "x-pointsman-fallback", "x-pointsman-route", "x-pointsman-reason",
        }  # fmt: skip


def test_retries_on_the_same_upstream_never_follow_a_timeout(rendered: Render) -> None:
    for route in live_routes(rendered(one("https://llm.example"))):
        policy = route["route"]["retry_policy"]
        assert policy["retry_on"] == "retriable-status-codes,connect-failure,reset-before-request"
        assert 504 not in policy["retriable_status_codes"]
        assert policy["num_retries"] == 1


def test_no_retries_means_none_and_still_a_time_limit(rendered: Render) -> None:
    for route in live_routes(rendered(one("https://llm.example") + "[retry]\nmax_retries = 0")):
        policy = route["route"]["retry_policy"]
        assert "retry_on" not in policy
        assert policy.get("num_retries", 0) == 0
        assert policy["per_try_timeout"] == "30s"


@pytest.mark.parametrize(
    ("base_url", "kind", "host", "port", "name"),
    [
        ("http://127.0.0.1:9000", "STATIC", "127.0.0.1", 9000, "127.0.0.1:9000"),
        ("http://[::1]:9000/v1", "STATIC", "::1", 9000, "[::1]:9000"),
        ("http://llm.example", "STRICT_DNS", "llm.example", 80, "llm.example"),
        ("https://LLM.example/v1", "STRICT_DNS", "llm.example", 443, "LLM.example"),
        ("https://llm.example:8443", "STRICT_DNS", "llm.example", 8443, "llm.example:8443"),
    ],
)
def test_provider_is_reached_at_its_host_and_port(
    rendered: Render, base_url: str, kind: str, host: str, port: int, name: str
) -> None:
    built = rendered(one(base_url))
    cluster = built.cluster("hosts.a")
    (locality,) = cluster["load_assignment"]["endpoints"]
    (endpoint,) = locality["lb_endpoints"]
    address = endpoint["endpoint"]["address"]["socket_address"]
    assert (address["address"], address["port_value"]) == (host, port)
    assert cluster["type"] == kind
    assert ("transport_socket" in cluster) == base_url.startswith("https")
    assert {route["route"]["host_rewrite_literal"] for route in live_routes(built)} == {name}


def test_certificate_must_be_the_hosts_own(rendered: Render) -> None:
    context = rendered(one("https://llm.example")).cluster("hosts.a")["transport_socket"][
        "typed_config"
    ]
    assert context["sni"] == "llm.example"
    validation = context["common_tls_context"]["validation_context"]
    (name,) = validation["match_typed_subject_alt_names"]
    assert name == {"san_type": "DNS", "matcher": {"exact": "llm.example"}}
    assert validation["trusted_ca"]["filename"]


def test_breaker_of_envoy_carries_the_policy(rendered: Render) -> None:
    built = rendered('[circuit_breaker]\nfailure_threshold = 7\ncooldown = "10s"')
    outlier = built.cluster("tier.primary")["outlier_detection"]
    assert outlier["consecutive_5xx"] == 7
    assert outlier["base_ejection_time"] == outlier["max_ejection_time"] == "9.500s"
    assert outlier["max_ejection_percent"] == 100
    assert built.cluster("tier.primary")["common_lb_config"]["healthy_panic_threshold"] == {}


def test_addresses_of_one_name_are_left_out_sooner_and_for_longer_than_the_upstream(
    rendered: Render,
) -> None:
    policy = '[circuit_breaker]\nfailure_threshold = 5\nwindow = "40s"\ncooldown = "10s"\n'
    outlier = rendered(one("https://llm.example") + policy).cluster("hosts.a")["outlier_detection"]
    assert outlier["consecutive_5xx"] == 3
    assert outlier["base_ejection_time"] == "41s"  # the next failures fall into another window
    assert outlier["max_ejection_percent"] == 50  # of one address, none
    alone = rendered(one("http://127.0.0.1:1") + policy).cluster("hosts.a")
    assert "outlier_detection" not in alone


def test_every_failure_of_envoys_own_has_a_reason_and_a_body(rendered: Render) -> None:
    mappers = rendered(one("https://llm.example")).hcm("tier.a")["local_reply_config"]["mappers"]
    reasons = []
    for mapper in mappers:
        headers = {
            each["header"]["key"]: each["header"]["value"] for each in mapper["headers_to_add"]
        }
        assert {"x-pointsman-upstream", "x-pointsman-model"} <= headers.keys()
        assert "error" in mapper["body_format_override"]["text_format_source"]["inline_string"]
        reasons.append(headers.get("x-pointsman-fail"))
    assert reasons[0] is None  # a body over the limit is the client's
    assert {"timeout", "overflow", "connect_error"} <= set(reasons)
    assert reasons[-1] == "connect_error"
