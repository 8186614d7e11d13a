"""What Envoy reads beside its bootstrap, and again when it changes: where certificates are, the clients'
keys and the upstreams'; pure, it opens no file.

Envoy follows a change only in a file of its own (SDS, ECDS). Certificates it judges itself, and keeps the
old one where the new one is unfit. Of keys it takes what it finds, a blank included: so it gets them in
such a file, from one who has judged them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Final

import betterproto2
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    ConfigSource,
    DataSource,
    ExtensionConfigSource,
    PathConfigSource,
    TransportSocket,
    TypedExtensionConfig,
    WatchedDirectory,
)
from envoy_data_plane.envoy.extensions.filters.http.api_key_auth.v3 import (
    ApiKeyAuth,
    Credential,
    Forwarding,
    KeySource,
)
from envoy_data_plane.envoy.extensions.filters.http.credential_injector.v3 import (
    CredentialInjector,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.http.injected_credentials.generic.v3 import Generic
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    CommonTlsContextCombinedCertificateValidationContext,
    DownstreamTlsContext,
    GenericSecret,
    SdsSecretConfig,
    Secret,
    TlsCertificate,
    TlsParameters,
    TlsParametersTlsProtocol,
)
from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryResponse

from extproc.config import ClientKey, Config, Tls, Upstream
from extproc.core import wire_names
from extproc.envoyconf import parts

CLIENT_KEYS: Final = "client-keys.json"
KEY_HEADERS: Final = ("authorization", "x-api-key")
"""Where a client's key is looked for, in this order; `Bearer ` in front of it is dropped."""

_SERVER: Final = "tls-server"
_CLIENTS: Final = "tls-clients"
_AUTH: Final = "auth"


def files(config: Config) -> Mapping[str, str]:
    """Contents by file name, all of `config.run_dir`, but for those that hold keys."""
    return {_file_of(secret.name): _response(secret) for secret in _secrets(config)}


def _secrets(config: Config) -> Iterable[Secret]:
    if (tls := config.server.tls) is not None:
        certificate = TlsCertificate(
            certificate_chain=DataSource(filename=tls.cert_file),
            private_key=DataSource(filename=tls.key_file),
        )
        # It can watch one folder; without any it watches for a rename of either file.
        if PurePath(tls.cert_file).parent == PurePath(tls.key_file).parent:
            certificate.watched_directory = _folder_of(tls.cert_file)
        yield Secret(name=_SERVER, tls_certificate=certificate)
        if tls.client_ca_file is not None:
            yield Secret(name=_CLIENTS, validation_context=_authorities(tls.client_ca_file))
    for upstream in config.upstreams.values():
        if upstream.ca_file is not None:
            yield Secret(name=_ca_name(upstream), validation_context=_authorities(upstream.ca_file))


def _authorities(path: str) -> CertificateValidationContext:
    return CertificateValidationContext(
        trusted_ca=DataSource(filename=path), watched_directory=_folder_of(path)
    )


def _folder_of(path: str) -> WatchedDirectory:
    """Kubernetes swaps a link beside the file. Half a file, written in place, does no harm: Envoy keeps
    what it has until the new one is whole.
    """
    return WatchedDirectory(path=str(PurePath(path).parent), watch_modify=True)


def client_keys(keys: Iterable[ClientKey]) -> str:
    """The filter that lets only these in. It holds them in clear: the file is its owner's alone."""
    # The filter indexes them by hash; nothing about a wrong key tells how near it was.
    auth = ApiKeyAuth(
        credentials=[Credential(key=each.key, client=each.client) for each in keys],
        key_sources=[KeySource(header=name) for name in KEY_HEADERS],
        forwarding=Forwarding(header=wire_names.CLIENT, hide_credentials=True),
    )
    return _response(TypedExtensionConfig(name=_AUTH, typed_config=parts.pack(auth)))


def auth_filter(config: Config) -> list[HttpFilter]:
    """Without its file Envoy does not start, and a file that it cannot read changes nothing."""
    if config.server.auth is None:
        return []
    discovery = ExtensionConfigSource(
        config_source=_source(config, CLIENT_KEYS),
        type_urls=["type.googleapis.com/envoy.extensions.filters.http.api_key_auth.v3.ApiKeyAuth"],
    )
    return [HttpFilter(name=_AUTH, config_discovery=discovery)]


def listener_tls(tls: Tls, config: Config) -> TransportSocket:
    context = DownstreamTlsContext(
        common_tls_context=CommonTlsContext(
            tls_params=TlsParameters(
                tls_minimum_protocol_version=TlsParametersTlsProtocol[tls.min_version.value]
            ),
            tls_certificate_sds_secret_configs=[_secret(config, _SERVER)],
            alpn_protocols=["h2", "http/1.1"],
        )
    )
    if tls.client_ca_file is not None:
        assert context.common_tls_context is not None
        context.common_tls_context.validation_context_sds_secret_config = _secret(config, _CLIENTS)
        context.require_client_certificate = True
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=parts.pack(context))


def trusting(
    upstream: Upstream, config: Config, names: CertificateValidationContext
) -> CommonTlsContext:
    """`names`, and a certificate that one of `ca_file` signed."""
    return CommonTlsContext(
        combined_validation_context=CommonTlsContextCombinedCertificateValidationContext(
            default_validation_context=names,
            validation_context_sds_secret_config=_secret(config, _ca_name(upstream)),
        )
    )


def upstream_key_file(upstream: Upstream) -> str:
    return _file_of(_key_name(upstream))


def upstream_key(upstream: Upstream, key: str) -> str:
    """The key of `api_key_file` in clear: the file is its owner's alone."""
    generic = GenericSecret(secret=DataSource(inline_string=key))
    return _response(Secret(name=_key_name(upstream), generic_secret=generic))


def key_injector(upstream: Upstream, config: Config) -> list[HttpFilter]:
    """The key of `api_key_file` onto each request; without one, Envoy answers 401 by itself."""
    if upstream.api_key_file is None:
        return []
    credential = Generic(
        credential=_secret(config, _key_name(upstream)), header_value_prefix="Bearer "
    )
    injector = CredentialInjector(
        overwrite=True,
        credential=TypedExtensionConfig(
            name="envoy.http.injected_credentials.generic", typed_config=parts.pack(credential)
        ),
    )
    return [parts.http_filter("key", injector)]


def _ca_name(upstream: Upstream) -> str:
    return f"ca.{upstream.id}"


def _key_name(upstream: Upstream) -> str:
    return f"key.{upstream.id}"


def _file_of(secret: str) -> str:
    return f"{secret}.json"


def _secret(config: Config, name: str) -> SdsSecretConfig:
    return SdsSecretConfig(name=name, sds_config=_source(config, _file_of(name)))


def _source(config: Config, file: str) -> ConfigSource:
    return ConfigSource(
        path_config_source=PathConfigSource(path=str(PurePath(config.run_dir) / file)),
        resource_api_version=ApiVersion.V3,
    )


def _response(resource: betterproto2.Message) -> str:
    return json.dumps(parts.plain(DiscoveryResponse(resources=[parts.pack(resource)])), indent=1)
