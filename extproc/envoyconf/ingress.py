"""The client-facing listener: what is stripped, bounded and unpacked, who decides, where it goes."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import msgspec
from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
    HeaderMutation as MutationRule,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
    HeaderMutationRemoveOnMatch,
)
from envoy_data_plane.envoy.config.core.v3 import (
    GrpcService,
    GrpcServiceEnvoyGrpc,
    Http2ProtocolOptions,
    RuntimeFeatureFlag,
    TrafficDirection,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    Route,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.compression.gzip.decompressor.v3 import Gzip
from envoy_data_plane.envoy.extensions.filters.http.decompressor.v3 import (
    Decompressor,
    DecompressorCommonDirectionConfig,
    DecompressorRequestDirectionConfig,
    DecompressorResponseDirectionConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.http.set_metadata.v3 import Config as SetMetadata
from envoy_data_plane.envoy.extensions.filters.http.set_metadata.v3 import (
    Metadata as SetMetadataEntry,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    LocalReplyConfig,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Struct

from extproc.config import Config, route_chain
from extproc.core import wire_names
from extproc.core.errors import (
    BAD_REQUEST,
    DUPLICATE_MODEL,
    GATEWAY_ERROR,
    HEADERS_TOO_LARGE,
    INVALID_API_KEY,
    INVALID_JSON,
    NO_UPSTREAM,
    REQUEST_TIMEOUT,
    REQUEST_TOO_LARGE,
    ROUTER_UNAVAILABLE,
    UPSTREAM_TIMEOUT,
    FallbackReason,
    RouteReason,
    error_body,
)
from extproc.core.exchange import Respond
from extproc.envoyconf import access_log, chain, files, lua, parts, tracing

STREAM_WINDOW_BYTES: Final = 256 * 1024
CONNECTION_WINDOW_BYTES: Final = 4 * STREAM_WINDOW_BYTES
"""Of a client's HTTP/2: 25 Mbit/s for an upload at 80 ms round trip, 100 for all of a connection."""
SLACK_S: Final = 0.6
"""How much later than the router's deadline Envoy gives up on the sidecar: it answers first.

A burst of 300 keeps the sidecar's loop busy for up to 0.4 s before it comes to the last of them.
"""

_STEERING_PREFIXES: Final = (wire_names.PREFIX, "x-envoy-")
_LOGGED_REQUEST: Final = (
    wire_names.CHAIN,
    wire_names.ROUTE,
    wire_names.REASON,
    wire_names.ATTEMPTS,
    wire_names.FALLBACK,
    wire_names.SKIP,
    wire_names.ADMISSION,
    "x-request-id",
)
_LOGGED_RESPONSE: Final = (wire_names.UPSTREAM, wire_names.FALLBACK, wire_names.ATTEMPTS)


def message_timeout_s(config: Config) -> float:
    return config.router.deadline_s + SLACK_S


def listener(config: Config) -> Listener:
    hcm = HttpConnectionManager(
        stat_prefix="ingress",
        use_remote_address=True,
        # Platform teams correlate by their own id; it never leaves a label.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        server_name="pointsman",
        normalize_path=True,
        merge_slashes=True,
        # Envoy buffers what the window lets in: with its default, 16 MiB of a body passed any limit.
        http2_protocol_options=Http2ProtocolOptions(
            initial_stream_window_size=STREAM_WINDOW_BYTES,
            initial_connection_window_size=CONNECTION_WINDOW_BYTES,
        ),
        request_timeout=parts.seconds(config.server.read_timeout_s),
        request_headers_timeout=parts.seconds(config.server.read_timeout_s),
        stream_idle_timeout=timedelta(),  # the routes' idle_timeout decides
        tracing=tracing.of_requests(config),
        request_id_extension=tracing.request_ids(config),
        delayed_close_timeout=parts.DELAYED_CLOSE,
        early_header_mutation_extensions=[_strip()],
        local_reply_config=_local_replies(),
        access_log=[
            parts.access_log(wire_names.LOG_REQUEST, _LOGGED_REQUEST, _LOGGED_RESPONSE),
            *access_log.loggers(config),
        ],
        http_filters=[
            parts.http_filter("admitted", _admitted()),
            *files.auth_filter(config),
            parts.http_filter("gunzip", _gunzip()),
            parts.http_filter("ext_proc", _ext_proc(config)),
            parts.lua_filter("ingress", "ingress", _script(config)),
            parts.http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)),
        ],
        route_config=RouteConfiguration(
            name="ingress",
            virtual_hosts=[
                VirtualHost(
                    name="ingress",
                    domains=["*"],
                    response_headers_to_add=[
                        parts.header(name, f"%REQ({name})%")
                        for name in (wire_names.ROUTE, wire_names.REASON)
                    ],
                    routes=_routes(config),
                )
            ],
        ),
    )
    listen, tls = config.server.listen, config.server.tls
    chains = parts.serving(hcm)
    if tls is not None:
        (chain_,) = chains
        chain_.transport_socket = files.listener_tls(tls, config)
        # A client that connects and says nothing.
        chain_.transport_socket_connect_timeout = parts.seconds(config.server.read_timeout_s)
    return Listener(
        name="ingress",
        # What `/drain_listeners?inboundonly` closes; the tiers stay, for requests in flight.
        traffic_direction=TrafficDirection.INBOUND,
        address=parts.socket_address(listen.host, listen.port),
        per_connection_buffer_limit_bytes=1024 * 1024,
        filter_chains=chains,
    )


def sidecar_cluster(config: Config) -> Cluster:
    """The sidecar on its Unix socket: ext_proc and the access log service."""
    return Cluster(
        name=parts.EXTPROC_CLUSTER,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(milliseconds=250),
        # One stream per request in flight; overflow would mean requests passing the sidecar by.
        circuit_breakers=parts.concurrency(parts.UNLIMITED),
        typed_extension_protocol_options={parts.HTTP_OPTIONS: parts.http2_options()},
        load_assignment=parts.load_assignment(
            parts.EXTPROC_CLUSTER, parts.pipe_address(config.extproc_socket)
        ),
    )


def _routes(config: Config) -> list[Route]:
    chains = config.chains()
    default = next(c for c in chains if c.name == route_chain(config.router.default))
    return [
        # The sidecar answers it before routing; only without the sidecar does it get here.
        Route(
            name="explain",
            match=RouteMatch(path="/route"),
            request_body_buffer_limit=parts.held_bytes(config.server.max_body_bytes),
            direct_response=DirectResponseAction(
                status=ROUTER_UNAVAILABLE.status, body_format=parts.error_format(ROUTER_UNAVAILABLE)
            ),
        ),
        *(chain.route(each, config) for each in chains),
        chain.route(default, config, is_default=True),
    ]


def _strip() -> TypedExtensionConfig:
    """Nobody outside may steer: not with our headers, nor with Envoy's own timeouts and retries."""
    return TypedExtensionConfig(
        name="strip",
        typed_config=parts.pack(
            EarlyHeaderMutation(
                mutations=[
                    MutationRule(
                        remove_on_match=HeaderMutationRemoveOnMatch(
                            key_matcher=StringMatcher(prefix=prefix)
                        )
                    )
                    for prefix in _STEERING_PREFIXES
                ]
            )
        ),
    )


def _admitted() -> SetMetadata:
    """Metadata, because a header could be spelt by a client whose request Envoy refuses at once."""
    return SetMetadata(
        metadata=[
            SetMetadataEntry(
                metadata_namespace=wire_names.METADATA,
                value=Struct.from_dict({wire_names.ADMITTED: True}),
                allow_overwrite=True,
            )
        ]
    )


def _gunzip() -> Decompressor:
    """Plain bodies for the sidecar and the tiers; answers are left as they are."""
    return Decompressor(
        decompressor_library=TypedExtensionConfig(name="gzip", typed_config=parts.pack(Gzip())),
        request_direction_config=DecompressorRequestDirectionConfig(
            advertise_accept_encoding=False
        ),
        response_direction_config=DecompressorResponseDirectionConfig(
            common_config=DecompressorCommonDirectionConfig(
                enabled=RuntimeFeatureFlag(
                    default_value=False, runtime_key="pointsman.decompress_responses"
                )
            )
        ),
    )


def _ext_proc(config: Config) -> ExternalProcessor:
    named = {name for route in config.routes for name, _ in route.headers}
    return ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=parts.EXTPROC_CLUSTER)
        ),
        failure_mode_allow=True,  # a dead router degrades to the default route, and ingress.lua says so
        message_timeout=parts.seconds(message_timeout_s(config)),
        processing_mode=ProcessingMode(
            request_header_mode=ProcessingModeHeaderSendMode.SEND,
            request_body_mode=ProcessingModeBodySendMode.BUFFERED,
            request_trailer_mode=ProcessingModeHeaderSendMode.SKIP,
            response_header_mode=ProcessingModeHeaderSendMode.SKIP,
            response_body_mode=ProcessingModeBodySendMode.NONE,
            response_trailer_mode=ProcessingModeHeaderSendMode.SKIP,
        ),
        forward_rules=parts.only_headers(wire_names.READ | named),
    )


def _script(config: Config) -> str:
    default = route_chain(config.router.default)
    chain_ = next(c for c in config.chains() if c.name == default)
    model = config.upstreams[chain_.upstreams[0]].model
    return lua.source(
        "ingress.lua",
        {
            "chain": default,
            "route": config.router.default,
            "reason": RouteReason.DEGRADED_BYPASSED.value,
            "model": msgspec.json.encode(model).decode(),
            "model_name": model,
            "model_paths": ",".join(wire_names.MODEL_PATHS),
            "invalid": error_body(INVALID_JSON).decode(),
            "duplicate": error_body(DUPLICATE_MODEL).decode(),
            "bad_request": error_body(BAD_REQUEST).decode(),
        },
        json=True,
    )


def _local_replies() -> LocalReplyConfig:
    """Nobody gets an empty error, not even from Envoy's own HTTP codec."""
    unrouted = [
        parts.header(name, value)
        for name, value in Respond(status=0, body=b"").headers.items()
        if name.startswith(wire_names.PREFIX)
    ]
    unanswered = [
        parts.header(wire_names.UPSTREAM, "none"),
        parts.header(wire_names.MODEL, "none"),
        parts.header(wire_names.ATTEMPTS, f"%REQ({wire_names.ATTEMPTS})%"),
    ]
    return LocalReplyConfig(
        mappers=[
            # The sidecar's own 4xx are local replies too and keep their bodies.
            parts.local_reply(parts.flagged(["DPE"]), BAD_REQUEST, unrouted),
            # The filter of the clients' keys is all that says 401 here; an upstream's is no local reply.
            parts.local_reply(
                parts.status_is(401),
                INVALID_API_KEY,
                [*unrouted, parts.header("www-authenticate", "Bearer")],
            ),
            *(
                parts.local_reply(parts.status_is(kind.status), kind, unrouted)
                for kind in (REQUEST_TIMEOUT, REQUEST_TOO_LARGE, HEADERS_TOO_LARGE)
            ),
            # HTTP/1.0, an upgrade, an encoding of the transfer: each has a status of its own.
            *(
                parts.local_reply(
                    parts.all_of(parts.status_is(status), parts.admitted(invert=True)),
                    BAD_REQUEST,
                    unrouted,
                )
                for status in (400, 403, 426, 501)
            ),
            # Outlier detection has ejected every member of a chain without a rule.
            parts.local_reply(
                parts.flagged(["UH"]),
                NO_UPSTREAM,
                [*unanswered, parts.header(wire_names.FALLBACK, FallbackReason.CIRCUIT_OPEN.value)],
            ),
            parts.local_reply(
                parts.all_of(parts.status_is(504), parts.any_flag()), UPSTREAM_TIMEOUT, unanswered
            ),
            parts.local_reply(
                parts.all_of(parts.status_at_least(500), parts.any_flag()),
                GATEWAY_ERROR,
                unanswered,
            ),
        ]
    )
