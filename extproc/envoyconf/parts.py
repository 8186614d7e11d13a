"""Small typed builders shared by the ingress, the chains and the tiers; pure, one message each."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import betterproto2
from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    AndFilter,
    ComparisonFilter,
    ComparisonFilterOp,
    MetadataFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ApiVersion,
    DataSource,
    EnvoyInternalAddress,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    Metadata,
    Pipe,
    RuntimeUInt32,
    SocketAddress,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
    CommonGrpcAccessLogConfig,
    HttpGrpcAccessLogConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import HeaderForwardingRules
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpFilter,
    ResponseMapper,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import (
    ListStringMatcher,
    MetadataMatcher,
    MetadataMatcherPathSegment,
    StringMatcher,
    ValueMatcher,
)
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any, Struct

from extproc.core import wire_names
from extproc.core.errors import ErrorKind, error_body

EXTPROC_CLUSTER: Final = "extproc"
HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
DELAYED_CLOSE: Final = timedelta(milliseconds=50)
"""Envoy's default of 1 s lets a broken stream look alive for 1 s more."""
_LONGER_BYTES: Final = 64 * 1024


def pack(message: betterproto2.Message) -> Any:
    return Any.pack(message)


def plain(message: betterproto2.Message) -> dict[str, object]:
    """As Envoy reads it; betterproto2 spells the JSON name of `consecutive_5xx` wrongly."""
    return message.to_dict(casing=_as_is)  # type: ignore[arg-type]  # any callable serves


def _as_is(name: str) -> str:
    return name.rstrip("_")


def seconds(value_s: float) -> timedelta:
    return timedelta(milliseconds=round(value_s * 1000))


def header(key: str, value: str) -> HeaderValueOption:
    """A header that replaces whatever stands there; `value` is an Envoy format string."""
    return HeaderValueOption(
        header=HeaderValue(key=key, value=value),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def verbatim(text: str) -> str:
    """`text` inside an Envoy format string, where a percent sign starts a command."""
    return text.replace("%", "%%")


def http_filter(name: str, message: betterproto2.Message) -> HttpFilter:
    return HttpFilter(name=name, typed_config=pack(message))


def only_headers(names: Iterable[str]) -> HeaderForwardingRules:
    """Of a message's headers, send the sidecar these alone: encoding the rest cost both sides time."""
    patterns = [StringMatcher(exact=name) for name in sorted(names)]
    return HeaderForwardingRules(allowed_headers=ListStringMatcher(patterns=patterns))


def lua_filter(name: str, stat_prefix: str, source: str) -> HttpFilter:
    return http_filter(
        name, Lua(stat_prefix=stat_prefix, default_source_code=DataSource(inline_string=source))
    )


def text_body(text: str, *, content_type: str = "application/json") -> SubstitutionFormatString:
    """A response body; `text` is an Envoy format string, already JSON where it has to be."""
    return SubstitutionFormatString(
        text_format_source=DataSource(inline_string=text), content_type=content_type
    )


def error_format(kind: ErrorKind) -> SubstitutionFormatString:
    return text_body(verbatim(error_body(kind).decode()))


def status_at_least(status: int) -> AccessLogFilter:
    return _status(ComparisonFilterOp.GE, status)


def status_is(status: int) -> AccessLogFilter:
    return _status(ComparisonFilterOp.EQ, status)


def _status(op: ComparisonFilterOp, status: int) -> AccessLogFilter:
    # Envoy demands a runtime key; nobody sets it, so the default is the value.
    value = RuntimeUInt32(default_value=status, runtime_key="pointsman.unset")
    return AccessLogFilter(
        status_code_filter=StatusCodeFilter(comparison=ComparisonFilter(op=op, value=value))
    )


def all_of(*filters: AccessLogFilter) -> AccessLogFilter:
    return AccessLogFilter(and_filter=AndFilter(filters=list(filters)))


def admitted(*, invert: bool = False) -> AccessLogFilter:
    """Our filters saw the request; Envoy's codec and its first checks refuse some before."""
    return AccessLogFilter(
        metadata_filter=MetadataFilter(
            matcher=MetadataMatcher(
                filter=wire_names.METADATA,
                path=[MetadataMatcherPathSegment(key=wire_names.ADMITTED)],
                value=ValueMatcher(bool_match=not invert),  # the filter ignores `invert`
            ),
            match_if_key_not_found=invert,
        )
    )


def any_flag() -> AccessLogFilter:
    """Envoy failed by itself: a direct response carries no response flag."""
    return AccessLogFilter(response_flag_filter=ResponseFlagFilter())


def flagged(flags: Sequence[str]) -> AccessLogFilter:
    return AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(flags)))


def local_reply(
    when: AccessLogFilter, kind: ErrorKind, headers: Iterable[HeaderValueOption] = ()
) -> ResponseMapper:
    """A reply that Envoy makes by itself, in OpenAI's error shape."""
    return ResponseMapper(
        filter=when, body_format_override=error_format(kind), headers_to_add=list(headers)
    )


def held_bytes(max_body_bytes: int) -> int:
    """What Envoy may hold of a body: one of the largest size, and the name of a model that is longer
    than what the client wrote. The sidecar keeps clients to the size itself.
    """
    return max_body_bytes + _LONGER_BYTES


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def socket_address(host: str, port: int) -> Address:
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def pipe_address(path: str) -> Address:
    return Address(pipe=Pipe(path=path))


def internal_address(listener: str) -> Address:
    return Address(envoy_internal_address=EnvoyInternalAddress(server_listener_name=listener))


def load_assignment(
    cluster: str, address: Address, metadata: Mapping[str, str] | None = None
) -> ClusterLoadAssignment:
    """One endpoint; `metadata` is what `%UPSTREAM_METADATA(pointsman:KEY)%` prints."""
    endpoint = LbEndpoint(endpoint=Endpoint(address=address))
    if metadata is not None:
        endpoint.metadata = Metadata(
            filter_metadata={wire_names.METADATA: Struct.from_dict(dict(metadata))}
        )
    return ClusterLoadAssignment(
        cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=[endpoint])]
    )


def strict_lb() -> ClusterCommonLbConfig:
    """No panic routing to hosts known to be down, and no second of delay before one is left out.

    With the default merge window of 1 s, 23 requests reached a broken primary instead of 5.
    """
    return ClusterCommonLbConfig(
        healthy_panic_threshold=Percent(value=0), update_merge_window=timedelta()
    )


UNLIMITED: Final = 1_000_000
"""For clusters inside: Envoy's defaults (1024 requests, 3 retries at once) would end requests in an
error that nothing retries. What an upstream can take is bounded where its hosts are."""


def concurrency(limit: int) -> CircuitBreakers:
    """Envoy's circuit breakers are concurrency thresholds; the failure breaker is elsewhere."""
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=limit,
                max_pending_requests=limit,
                max_requests=limit,
                max_retries=limit,
            )
        ]
    )


def http1_options(filters: Sequence[HttpFilter] = ()) -> Any:
    return pack(
        HttpProtocolOptions(
            explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                http_protocol_options=Http1ProtocolOptions()
            ),
            http_filters=list(filters),
        )
    )


def http2_options() -> Any:
    """What a gRPC server is spoken to with."""
    return pack(
        HttpProtocolOptions(
            explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                http2_protocol_options=Http2ProtocolOptions()
            )
        )
    )


def internal_cluster(
    name: str, listener: str, *, metadata: Mapping[str, str], buffer_bytes: int
) -> Cluster:
    """A member of a chain: the internal listener of one tier."""
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=1),
        per_connection_buffer_limit_bytes=buffer_bytes,
        common_lb_config=strict_lb(),
        circuit_breakers=concurrency(UNLIMITED),
        typed_extension_protocol_options={HTTP_OPTIONS: http1_options()},
        load_assignment=load_assignment(name, internal_address(listener), metadata),
    )


def access_log(
    log_name: str,
    request_headers: Sequence[str],
    response_headers: Sequence[str],
    tags: Mapping[str, str] | None = None,
) -> AccessLog:
    """Envoy's gRPC access log service: one record per request or attempt, to the sidecar.

    Records travel in batches every 20 ms, off the way of the request. `tags`: what a record has no
    field for, as Envoy format strings.
    """
    return AccessLog(
        name="account",
        typed_config=pack(
            HttpGrpcAccessLogConfig(
                common_config=CommonGrpcAccessLogConfig(
                    log_name=log_name,
                    transport_api_version=ApiVersion.V3,
                    grpc_service=GrpcService(
                        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXTPROC_CLUSTER)
                    ),
                    buffer_flush_interval=timedelta(milliseconds=20),
                    buffer_size_bytes=16384,
                    custom_tags=[
                        CustomTag(tag=tag, value=value) for tag, value in (tags or {}).items()
                    ],
                ),
                additional_request_headers_to_log=list(request_headers),
                additional_response_headers_to_log=list(response_headers),
            )
        ),
    )


def serving(hcm: HttpConnectionManager) -> list[FilterChain]:
    """What a listener that speaks HTTP does with every connection."""
    name = "envoy.filters.network.http_connection_manager"
    return [FilterChain(filters=[Filter(name=name, typed_config=pack(hcm))])]
