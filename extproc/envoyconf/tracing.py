"""Envoy's spans: one for the request, one for each attempt, to an OTLP receiver; nothing when off."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.trace.v3 import OpenTelemetryConfig, TracingHttp
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManagerTracing,
    RequestIdExtension,
)
from envoy_data_plane.envoy.extensions.request_id.uuid.v3 import UuidRequestIdConfig
from envoy_data_plane.envoy.extensions.tracers.opentelemetry.samplers.v3 import (
    ParentBasedSamplerConfig,
    TraceIdRatioBasedSamplerConfig,
)
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.envoy.type.v3 import FractionalPercent, FractionalPercentDenominatorType

from extproc.config import Config
from extproc.core import wire_names
from extproc.envoyconf import parts

CLUSTER: Final = "otlp"
SERVICE: Final = "pointsman-envoy"
REQUEST_SPAN: Final = "request"
ATTEMPT_SPAN: Final = "attempt"

# Attributes of ours, as Envoy format strings. Those that Envoy adds by itself stand beside them.
REQUEST_TAGS: Final[Mapping[str, str]] = {
    "pointsman.route": f"%REQ({wire_names.ROUTE}):64%",
    "pointsman.reason": f"%REQ({wire_names.REASON}):64%",
    "pointsman.upstream": f"%RESP({wire_names.UPSTREAM})%",
    "pointsman.attempts": f"%REQ({wire_names.ATTEMPTS}):512%",
    "pointsman.fallback": f"%REQ({wire_names.FALLBACK}):64%",
    "url.path": "%PATH(NQ:PATH):256%",
}
ATTEMPT_TAGS: Final[Mapping[str, str]] = {
    "pointsman.model": f"%RESP({wire_names.MODEL})%",
    "pointsman.fail": f"%RESP({wire_names.FAIL})%",
    "pointsman.tokens.prompt": f"%DYNAMIC_METADATA({wire_names.METADATA}:{wire_names.PROMPT_TOKENS})%",
    "pointsman.tokens.completion": (
        f"%DYNAMIC_METADATA({wire_names.METADATA}:{wire_names.COMPLETION_TOKENS})%"
    ),
}


def of_requests(config: Config) -> HttpConnectionManagerTracing | None:
    return _tracing(config, REQUEST_SPAN, REQUEST_TAGS)


def of_attempts(config: Config, upstream_name: str) -> HttpConnectionManagerTracing | None:
    name = f"{ATTEMPT_SPAN} {parts.verbatim(upstream_name)}"
    tags = {**ATTEMPT_TAGS, "pointsman.upstream": parts.verbatim(upstream_name)}
    return _tracing(config, name, tags)


def request_ids(config: Config) -> RequestIdExtension | None:
    """Envoy would sample by the client's id, and write its decision into it."""
    if config.tracing.endpoint is None:
        return None
    return RequestIdExtension(
        typed_config=parts.pack(
            UuidRequestIdConfig(pack_trace_reason=False, use_request_id_for_trace_sampling=False)
        )
    )


def clusters(config: Config) -> list[Cluster]:
    """The OTLP receiver's, when there is one."""
    if config.tracing.endpoint is None:
        return []
    url = urlsplit(config.tracing.endpoint)
    assert url.hostname is not None
    assert url.port is not None
    is_ip = parts.is_ip(url.hostname)
    return [
        Cluster(
            name=CLUSTER,
            type=ClusterDiscoveryType.STATIC if is_ip else ClusterDiscoveryType.STRICT_DNS,
            wait_for_warm_on_init=None if is_ip else False,
            connect_timeout=timedelta(seconds=1),
            typed_extension_protocol_options={parts.HTTP_OPTIONS: parts.http2_options()},
            load_assignment=parts.load_assignment(
                CLUSTER, parts.socket_address(url.hostname, url.port)
            ),
        )
    ]


def _sampler(share: float) -> TypedExtensionConfig:
    """As the caller decided; where a trace begins here, by its id."""
    millionths = FractionalPercent(
        numerator=round(share * 1_000_000), denominator=FractionalPercentDenominatorType.MILLION
    )
    ratio = TypedExtensionConfig(
        name="envoy.tracers.opentelemetry.samplers.trace_id_ratio_based",
        typed_config=parts.pack(TraceIdRatioBasedSamplerConfig(sampling_percentage=millionths)),
    )
    return TypedExtensionConfig(
        name="envoy.tracers.opentelemetry.samplers.parent_based",
        typed_config=parts.pack(ParentBasedSamplerConfig(wrapped_sampler=ratio)),
    )


def _tracing(
    config: Config, name: str, tags: Mapping[str, str]
) -> HttpConnectionManagerTracing | None:
    if config.tracing.endpoint is None:
        return None
    provider = OpenTelemetryConfig(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=CLUSTER), timeout=timedelta(seconds=1)
        ),
        service_name=SERVICE,
        sampler=_sampler(config.tracing.sampling),
    )
    return HttpConnectionManagerTracing(
        provider=TracingHttp(name="envoy.tracers.opentelemetry", typed_config=parts.pack(provider)),
        # The span of an attempt is its tier's; one more of the router's would say nothing.
        spawn_upstream_span=False,
        operation=name,
        # Envoy's own URL attribute would hold the query, and with it perhaps a key.
        max_path_tag_length=0,
        custom_tags=[CustomTag(tag=tag, value=value) for tag, value in tags.items()],
    )
