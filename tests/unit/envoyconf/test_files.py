"""What Envoy is pointed at: files by path, keys only in the file that is the owner's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from extproc.config import ClientKey
from extproc.envoyconf.files import (
    CLIENT_KEYS,
    client_keys,
    files,
    upstream_key,
    upstream_key_file,
)

Render = Callable[[str], Any]

SECURED = """
[upstream.a]
base_url = "https://10.1.2.3"
model = "m"
ca_file = "/etc/ca/ca.crt"
api_key_file = "/etc/keys/a"
[upstream.b]
base_url = "https://b.example"
model = "m"
[server.tls]
cert_file = "/etc/tls/tls.crt"
key_file = "/etc/tls/tls.key"
client_ca_file = "/etc/tls/ca.crt"
min_version = "TLSv1_3"
[server.auth]
keys_file = "/etc/clients"
[extproc]
socket = "/run/p/x.sock"
"""
KEY = "sk-0123456789abcdef"


def written(built: Any) -> dict[str, Any]:
    a = built.config.upstreams["a"]
    found = {
        **files(built.config),
        CLIENT_KEYS: client_keys([ClientKey("team-a", KEY)]),
        upstream_key_file(a): upstream_key(a, "sk-a"),
    }
    return {name: json.loads(text)["resources"][0] for name, text in found.items()}


def test_a_plain_configuration_needs_no_file(rendered: Render) -> None:
    assert files(rendered("").config) == {}


def test_every_file_that_is_written_is_the_one_that_is_read(rendered: Render) -> None:
    built = rendered(SECURED)
    names = {f"/run/p/{name}" for name in written(built)}
    assert names == {
        "/run/p/tls-server.json",
        "/run/p/tls-clients.json",
        "/run/p/ca.a.json",
        "/run/p/key.a.json",
        "/run/p/client-keys.json",
    }
    assert all(built.text.count(f"path: {name}\n") == 1 for name in names)


def test_secrets_are_named_as_their_files_are_and_their_folders_watched(rendered: Render) -> None:
    found = written(rendered(SECURED))
    del found[CLIENT_KEYS]
    assert all(f"{each['name']}.json" == file for file, each in found.items())
    server = found["tls-server.json"]["tls_certificate"]
    assert server["certificate_chain"] == {"filename": "/etc/tls/tls.crt"}
    assert server["watched_directory"] == {"path": "/etc/tls", "watch_modify": True}
    # Never the path of the key's file: Envoy would take a blank for a key.
    assert found["key.a.json"]["generic_secret"]["secret"] == {"inline_string": "sk-a"}


def test_keys_stand_in_their_file_and_not_in_the_bootstrap(rendered: Render) -> None:
    built = rendered(SECURED)
    auth = written(built)[CLIENT_KEYS]["typed_config"]
    assert auth["credentials"] == [{"key": KEY, "client": "team-a"}]
    assert auth["forwarding"] == {"header": "x-pointsman-client", "hide_credentials": True}
    assert KEY not in built.text


def test_the_check_of_keys_comes_before_anything_that_reads_the_request(rendered: Render) -> None:
    names = [each["name"] for each in rendered(SECURED).filters("ingress")]
    assert names[:4] == ["admitted", "auth", "gunzip", "ext_proc"]
    assert "auth" not in [each["name"] for each in rendered("").filters("ingress")]


def test_listener_asks_for_client_certificates_only_where_configured(rendered: Render) -> None:
    (chain,) = rendered(SECURED).listener("ingress")["filter_chains"]
    tls = chain["transport_socket"]["typed_config"]
    assert tls["require_client_certificate"] is True
    assert tls["common_tls_context"]["alpn_protocols"] == ["h2", "http/1.1"]
    version = tls["common_tls_context"]["tls_params"]["tls_minimum_protocol_version"]
    assert version in ("TLSv1_3", 4)
    plain = SECURED.replace('client_ca_file = "/etc/tls/ca.crt"', "")
    (chain,) = rendered(plain).listener("ingress")["filter_chains"]
    tls = chain["transport_socket"]["typed_config"]
    assert "require_client_certificate" not in tls
    (chain,) = rendered("").listener("ingress")["filter_chains"]
    assert "transport_socket" not in chain


def test_upstreams_are_verified_by_name_or_address_with_the_systems_cas_or_their_own(
    rendered: Render,
) -> None:
    built = rendered(SECURED)
    tls = built.cluster("hosts.a")["transport_socket"]["typed_config"]
    assert "sni" not in tls
    combined = tls["common_tls_context"]["combined_validation_context"]
    (name,) = combined["default_validation_context"]["match_typed_subject_alt_names"]
    assert name["matcher"] == {"exact": "10.1.2.3"}
    assert name["san_type"] in ("IP_ADDRESS", 4)
    assert "trusted_ca" not in combined["default_validation_context"]
    assert combined["validation_context_sds_secret_config"]["name"] == "ca.a"
    tls = built.cluster("hosts.b")["transport_socket"]["typed_config"]
    assert tls["sni"] == "b.example"
    context = tls["common_tls_context"]["validation_context"]
    assert context["trusted_ca"] == {"filename": "/etc/ssl/certs/ca-certificates.crt"}
    (name,) = context["match_typed_subject_alt_names"]
    assert name["matcher"] == {"exact": "b.example"}


def test_keys_to_the_gateway_go_no_further(rendered: Render) -> None:
    """Whether the upstream has a key of ours or not."""
    built = rendered(SECURED)
    for upstream, removed in (("a", {"x-api-key", "api-key"}), ("b", {"authorization"})):
        route = built.routes(f"tier.{upstream}")[-1]
        assert {*removed, "x-pointsman-client"} <= set(route["request_headers_to_remove"])
    open_ = rendered(SECURED.replace('[server.auth]\nkeys_file = "/etc/clients"\n', ""))
    assert "authorization" not in open_.routes("tier.b")[-1]["request_headers_to_remove"]


def test_a_key_file_is_read_by_the_tier(rendered: Render) -> None:
    built = rendered(SECURED)
    names = [each["name"] for each in built.filters("tier.a")]
    assert names[-2:] == ["key", "envoy.filters.http.router"]
    assert "key" not in [each["name"] for each in built.filters("tier.b")]
