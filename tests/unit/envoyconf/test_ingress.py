"""How the sidecar is asked: which requests are told whole, and what a route of theirs changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TOLD = [":path", "content-encoding", "content-type", "x-request-id"]
Render = Callable[[str], Any]

ROUTE = '[router]\ndefault = "main"\n[[route]]\nname = "main"\nupstreams = ["primary"]\n'


WHOLE = {"ext_proc": {"disabled": True}, "told_whole": {"overrides": {}}}


def filters_of(route: dict[str, Any]) -> dict[str, Any]:
    """What a route says of single filters, without the types."""
    return {
        name: {key: value for key, value in each.items() if key != "@type"}
        for name, each in route.get("typed_per_filter_config", {}).items()
    }


def asking(built: Any) -> dict[str, dict[str, Any]]:
    """The ways to ask the sidecar, by the filter's name."""
    return {
        each["name"]: each["typed_config"]
        for each in built.filters("ingress")
        if each["name"] in ("ext_proc", "told_whole")
    }


def test_post_that_says_its_length_is_told_whole_and_everything_else_in_two_messages(
    rendered: Render,
) -> None:
    built = rendered(ROUTE)
    routes = built.routes("ingress")
    told = {each["name"]: each.get("disabled", False) for each in built.filters("ingress")}
    assert (told["ext_proc"], told["told_whole"]) == (False, True)
    whole = [each for each in routes if filters_of(each)]
    assert [each["match"].get("path") for each in whole] == ["/route", None]
    assert [filters_of(each) for each in whole] == [WHOLE, WHOLE]
    for each in whole:
        method, length, *plain = each["match"]["headers"]
        assert method == {"name": ":method", "string_match": {"exact": "POST"}}
        assert length["name"] == "content-length"
        assert int(length["range_match"]["start"]) == 1
        assert [matcher["name"] for matcher in plain] == TOLD
        # The one behind it takes what is left of the same requests, to the same end.
        behind = routes[routes.index(each) + 1]
        match = {key: value for key, value in each["match"].items() if key != "headers"}
        assert behind | {"typed_per_filter_config": each["typed_per_filter_config"]} == each | {
            "match": match
        }


def test_where_rules_look_at_headers_none_is_told_whole(rendered: Render) -> None:
    built = rendered(ROUTE + 'headers = { "x-team" = "data" }\n')
    assert list(asking(built)) == ["ext_proc"]
    assert not any(filters_of(each) for each in built.routes("ingress"))


def test_both_ways_to_ask_differ_in_what_is_told_and_fail_alike(rendered: Render) -> None:
    ways = asking(rendered(ROUTE))
    in_two, whole = ways["ext_proc"], ways["told_whole"]
    assert in_two["processing_mode"].get("request_header_mode", "SEND") == "SEND"
    assert whole["processing_mode"]["request_header_mode"] == "SKIP"
    assert whole["request_attributes"] == [f"request.headers['{name}']" for name in TOLD]
    assert whole["grpc_service"]["initial_metadata"] == [{"key": "pointsman-whole", "value": "1"}]
    for key in ("failure_mode_allow", "message_timeout"):
        assert whole[key] == in_two[key]
    for each in ways.values():
        assert each["processing_mode"]["request_body_mode"] == "BUFFERED"
