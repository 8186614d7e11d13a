"""A tier: the internal listener in front of one upstream, and the cluster of its real hosts.

Everything that belongs to one upstream lives here: model, credentials, host, path, times, retries
on the same host, what counts as a bad answer and why it failed.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Final

import msgspec
from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakersThresholdsRetryBudget,
    Cluster,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
    OutlierDetection,
)
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    Http1ProtocolOptions,
    TransportSocket,
    TypedExtensionConfig,
    UpstreamHttpProtocolOptions,
)
from envoy_data_plane.envoy.config.core.v3 import (
    HttpProtocolOptions as CommonHttpProtocolOptions,
)
from envoy_data_plane.envoy.config.listener.v3 import (
    Listener,
    ListenerInternalListenerConfig,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRateLimitedRetryBackOff,
    RetryPolicyResetHeader,
    RetryPolicyResetHeaderFormat,
    RetryPolicyRetryBackOff,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.content_parsers.json.v3 import (
    JsonContentParser,
    JsonContentParserRuleConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    ExtProcPerRoute,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata.v3 import (
    JsonToMetadataKeyValuePair,
    JsonToMetadataRule,
    JsonToMetadataSelector,
    JsonToMetadataValueType,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata.v3 import (
    SseToMetadata,
    SseToMetadataProcessingRules,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpConnectionManagerHcmAccessLogOptions,
    HttpFilter,
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsAutoHttpConfig,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from extproc.config import RETRY_AFTER_CAP_S, Config, Upstream
from extproc.core import wire_names
from extproc.core.errors import (
    GATEWAY_ERROR,
    NO_UPSTREAM,
    REQUEST_TOO_LARGE,
    UPSTREAM_TIMEOUT,
    ErrorKind,
    FallbackReason,
)
from extproc.envoyconf import files, lua, parts, tracing

SKIPPED_STATUS: Final = 460
"""Outlier detection counts 5xx, so a skipped or uncounted attempt travels as a 4xx of our own."""

_FIRST_TOKEN: Final = "first_token"  # noqa: S105  a filter, no secret
_WATCH_SLACK_S: Final = 1.0
"""How much later than the sidecar Envoy gives up waiting for a first chunk."""
_MAX_EVENT_BYTES: Final = 64 * 1024
"""A longer event passes unread; the one with the usage is some hundred bytes."""
CA_BUNDLE: Final = "/etc/ssl/certs/ca-certificates.crt"

_CLIENT_KEYS: Final = ("authorization", "x-api-key", "api-key")
_NEVER_FORWARDED: Final = (
    "cookie",
    # Answers are read here (usage, schema), so the provider is asked for plain ones.
    "accept-encoding",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-envoy-external-address",
    "x-envoy-internal",
    "x-envoy-attempt-count",
    "x-envoy-original-path",
    "x-envoy-expected-rq-timeout-ms",
    wire_names.CLIENT,
    wire_names.WATCH,
    wire_names.CHAIN,
    wire_names.ROUTE,
    wire_names.REASON,
    wire_names.MODEL_SPAN,
    wire_names.STREAM,
    wire_names.SKIP,
    wire_names.ADMISSION,
    wire_names.UPSTREAM,
    wire_names.ATTEMPTS,
    wire_names.FALLBACK,
)

_NEVER_BELIEVED: Final = (
    # A provider cannot speak in our name.
    wire_names.FAIL,
    wire_names.STATUS,
    wire_names.ATTEMPTS,
    wire_names.FALLBACK,
    wire_names.ROUTE,
    wire_names.REASON,
    # Nor steer this Envoy, or one in front of it: the first forbids any further try, also on the next
    # upstream, and every Envoy that limits rates sends it; the others take us for ill.
    "x-envoy-ratelimited",
    "x-envoy-degraded",
    "x-envoy-immediate-health-check-fail",
)

# Which response flags mean what: https://www.envoyproxy.io/docs/envoy/latest/configuration/
# observability/access_log/usage#response-flags-format
_FLAGS: Final[tuple[tuple[tuple[str, ...], FallbackReason, ErrorKind], ...]] = (
    (("UT",), FallbackReason.TIMEOUT, UPSTREAM_TIMEOUT),
    (("UO",), FallbackReason.OVERFLOW, GATEWAY_ERROR),
)


def member_name(upstream: Upstream) -> str:
    """The cluster that chains list; it carries the outlier detection."""
    return f"tier.{upstream.id}"


def member(upstream: Upstream, config: Config) -> Cluster:
    cluster = parts.internal_cluster(
        member_name(upstream),
        member_name(upstream),
        metadata={"name": upstream.name},
        buffer_bytes=parts.held_bytes(config.server.max_body_bytes),
    )
    cluster.outlier_detection = outlier_detection(config)
    return cluster


def outlier_detection(config: Config) -> OutlierDetection:
    """The circuit policy as far as Envoy alone can carry it: consecutive failures, no half-open.

    The ejection ends half a second before the cooldown does, so that the gate's first trial, let
    through at the cooldown, does not meet an upstream that Envoy still holds ejected.
    """
    ejection = parts.seconds(max(config.circuit.cooldown_s - 0.5, 0.25))
    detection = _in_a_row(config.circuit.failure_threshold, ejection)
    detection.max_ejection_time = ejection
    detection.max_ejection_time_jitter = timedelta()
    detection.max_ejection_percent = 100
    return detection


def _host_detection(config: Config) -> OutlierDetection:
    """Of the addresses that one name has: a broken one is left out before it has opened the circuit of
    all, and long enough that its next failures are not added to those.

    Half of them at most, so never the only one: a whole upstream is the circuit's to judge.
    """
    policy = config.circuit
    left_out = parts.seconds(max(policy.cooldown_s, policy.window_s) + 1)
    detection = _in_a_row((policy.failure_threshold + 1) // 2, left_out)
    detection.max_ejection_time = max(left_out, timedelta(minutes=5))  # longer each time
    detection.max_ejection_percent = 50
    return detection


def _in_a_row(failures: int, ejection: timedelta) -> OutlierDetection:
    return OutlierDetection(
        consecutive_5xx=failures,
        enforcing_consecutive_5xx=100,
        enforcing_success_rate=0,
        enforcing_consecutive_gateway_failure=0,
        interval=timedelta(milliseconds=250),  # un-ejection happens on its ticks
        base_ejection_time=ejection,
    )


def hosts_name(upstream: Upstream) -> str:
    return f"hosts.{upstream.id}"


def hosts(upstream: Upstream, config: Config) -> Cluster:
    """The provider itself."""
    name = hosts_name(upstream)
    limits = parts.concurrency(upstream.max_concurrent_requests)
    # A dying upstream is not hammered: retries are at most a fifth of what is in flight.
    limits.thresholds[0].max_retries = None
    limits.thresholds[0].retry_budget = CircuitBreakersThresholdsRetryBudget(
        budget_percent=Percent(value=20), min_retry_concurrency=3
    )
    cluster = Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC
        if parts.is_ip(upstream.host)
        else ClusterDiscoveryType.STRICT_DNS,
        dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED,
        # A name that does not resolve must not keep the listener from opening.
        wait_for_warm_on_init=None if parts.is_ip(upstream.host) else False,
        connect_timeout=parts.seconds(upstream.connect_timeout_s),
        per_connection_buffer_limit_bytes=parts.held_bytes(config.server.max_body_bytes),
        common_lb_config=parts.strict_lb(),
        circuit_breakers=limits,
        typed_extension_protocol_options={parts.HTTP_OPTIONS: _protocol(upstream)},
        load_assignment=parts.load_assignment(
            name, parts.socket_address(upstream.host, upstream.port)
        ),
    )
    if not parts.is_ip(upstream.host):
        cluster.outlier_detection = _host_detection(config)
    if upstream.tls:
        cluster.transport_socket = _tls(upstream, config)
    return cluster


def listener(upstream: Upstream, config: Config) -> Listener:
    name = member_name(upstream)
    script = lua.source(
        "tier.lua",
        {
            "name": upstream.name,
            "model_name": upstream.model,
            "model": msgspec.json.encode(upstream.model).decode(),
            "counted": "," + ",".join(sorted(config.circuit.counted_errors)) + ",",
        },
        json=True,
    )
    hcm = HttpConnectionManager(
        codec_type=HttpConnectionManagerCodecType.HTTP1,
        stat_prefix=name,
        generate_request_id=False,
        delayed_close_timeout=parts.DELAYED_CLOSE,
        # A trial's verdict is wanted at the headers of a stream, not at its end minutes later.
        access_log_options=HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=timedelta(seconds=1)
        ),
        stream_idle_timeout=timedelta(),  # the route's idle_timeout decides
        tracing=tracing.of_attempts(config, upstream.name),
        request_id_extension=tracing.request_ids(config),
        local_reply_config=LocalReplyConfig(mappers=_mappers(upstream)),
        access_log=[
            parts.access_log(
                wire_names.LOG_ATTEMPT_PREFIX + upstream.id,
                [],
                [wire_names.FAIL, "content-type"],
                # The record's own fields know of the first byte of headers only.
                {wire_names.FIRST_CHUNK_US: "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%"},
            )
        ],
        http_filters=[
            parts.lua_filter("tier", name, script),
            parts.http_filter("usage", _stream_usage()),
            *_first_token_watch(upstream),
            *files.key_injector(upstream, config),
            parts.http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)),
        ],
        route_config=RouteConfiguration(
            virtual_hosts=[
                VirtualHost(
                    name=name,
                    domains=["*"],
                    include_attempt_count_in_response=True,
                    routes=[_skip(upstream, config), *_routes(upstream, config)],
                )
            ]
        ),
    )
    return Listener(
        name=name,
        internal_listener=ListenerInternalListenerConfig(),
        ignore_global_conn_limit=True,  # a request inside is no client connection more
        per_connection_buffer_limit_bytes=parts.held_bytes(config.server.max_body_bytes),
        filter_chains=parts.serving(hcm),
    )


def idle_timeout_s(upstream: Upstream, config: Config) -> float:
    """Longest silence of a live stream.

    Envoy's route `idle_timeout` also runs before the headers, where it would end the exchange in a
    504 that nothing retries, so it stays above the longest wait for them.
    """
    return max(config.server.write_timeout_s, config.visit_limit_s(upstream) + 1)


def _first_token_watch(upstream: Upstream) -> list[HttpFilter]:
    """A second use of ext_proc: the sidecar holds the headers of a stream until its first chunk.

    Nothing native retries a stream whose headers came and whose first token does not. It is the
    sidecar that says when the time is up: should it die or hang meanwhile, Envoy sends the stream on
    unwatched. Were that a failure, the sidecar's end would be one of every stream that waits, and five
    of them eject an upstream that is well.
    """
    timeout_s = upstream.first_token_timeout_s
    if timeout_s is None:
        return []
    watch = ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=parts.EXTPROC_CLUSTER),
            initial_metadata=[
                HeaderValue(key=wire_names.WATCH_MS, value=str(round(timeout_s * 1000)))
            ],
        ),
        failure_mode_allow=True,
        message_timeout=parts.seconds(timeout_s + _WATCH_SLACK_S),
        processing_mode=ProcessingMode(
            request_header_mode=ProcessingModeHeaderSendMode.SKIP,
            response_header_mode=ProcessingModeHeaderSendMode.SEND,
            response_body_mode=ProcessingModeBodySendMode.STREAMED,
            response_trailer_mode=ProcessingModeHeaderSendMode.SKIP,
        ),
        forward_rules=parts.only_headers([wire_names.CONTENT_TYPE]),
        send_body_without_waiting_for_header_response=True,
    )
    return [parts.http_filter(_FIRST_TOKEN, watch)]


def _stream_usage() -> SseToMetadata:
    """Token counts out of an event stream as it passes, into the attempt's record.

    Nothing is held back for it, and an event that is no JSON or too long is only not read.
    """
    rules = [
        JsonContentParserRuleConfig(
            rule=JsonToMetadataRule(
                selectors=[
                    JsonToMetadataSelector(key="usage"),
                    JsonToMetadataSelector(key=count),
                ],
                on_present=JsonToMetadataKeyValuePair(
                    metadata_namespace=wire_names.METADATA,
                    key=count,
                    type=JsonToMetadataValueType.NUMBER,
                ),
            )
        )
        for count in (wire_names.PROMPT_TOKENS, wire_names.COMPLETION_TOKENS)
    ]
    return SseToMetadata(
        response_rules=SseToMetadataProcessingRules(
            content_parser=TypedExtensionConfig(
                name="json", typed_config=parts.pack(JsonContentParser(rules=rules))
            ),
            max_event_size=_MAX_EVENT_BYTES,
        )
    )


def _skip(upstream: Upstream, config: Config) -> Route:
    return Route(
        name="skip",
        match=RouteMatch(
            prefix="/",
            headers=[
                HeaderMatcher(
                    name=wire_names.SKIP, string_match=StringMatcher(contains=f",{upstream.id},")
                )
            ],
        ),
        request_body_buffer_limit=parts.held_bytes(config.server.max_body_bytes),
        direct_response=DirectResponseAction(
            status=SKIPPED_STATUS, body_format=parts.error_format(NO_UPSTREAM)
        ),
        response_headers_to_add=[
            parts.header(wire_names.FAIL, FallbackReason.CIRCUIT_OPEN.value),
            # What the client gets where nothing stands behind: a mode without the rule.
            parts.header(wire_names.STATUS, str(NO_UPSTREAM.status)),
        ],
    )


def _routes(upstream: Upstream, config: Config) -> list[Route]:
    """The client's path joined to `base_url`, what they share written once.

    base `/openai/v1`: `/v1/models` -> `/openai/v1/models`, `/openai/v1/models` stays, `/x` ->
    `/openai/v1/x`. So clients may use the provider's own paths or OpenAI's.
    """
    base = upstream.path
    segments = base.split("/")[1:] if base else []
    shared = ["/" + "/".join(segments[start:]) for start in range(len(segments))]
    joins = [(RouteMatch(path_separated_prefix=path), base) for path in shared]
    joins.append((RouteMatch(prefix="/"), f"{base}/" if base else ""))
    watched = [HeaderMatcher(name=wire_names.WATCH, present_match=True)]
    routes = []
    for match, rewrite in joins:
        plain = _route(upstream, config, match, rewrite)
        if upstream.first_token_timeout_s is not None:
            routes.append(
                _route(upstream, config, dataclasses.replace(match, headers=watched), rewrite)
            )
            disabled = parts.pack(ExtProcPerRoute(disabled=True))
            plain.typed_per_filter_config = {_FIRST_TOKEN: disabled}
        routes.append(plain)
    return routes


def _route(upstream: Upstream, config: Config, match: RouteMatch, rewrite: str) -> Route:
    removed = list(_NEVER_FORWARDED)
    added = []
    if upstream.has_key:
        removed += _CLIENT_KEYS[1:]
    elif config.server.auth is not None:
        removed += _CLIENT_KEYS  # they are keys to this gateway
    if upstream.api_key_env is not None:
        # Read by Envoy from its own environment: the secret is in no rendered file.
        added.append(parts.header("authorization", f"Bearer %ENVIRONMENT({upstream.api_key_env})%"))
    return Route(
        match=match,
        request_body_buffer_limit=parts.held_bytes(config.server.max_body_bytes),
        request_headers_to_remove=removed,
        request_headers_to_add=added,
        response_headers_to_remove=list(_NEVER_BELIEVED),
        route=RouteAction(
            cluster=hosts_name(upstream),
            host_rewrite_literal=upstream.url.netloc,
            prefix_rewrite=rewrite,
            timeout=timedelta(),
            idle_timeout=parts.seconds(idle_timeout_s(upstream, config)),
            retry_policy=_retry(upstream, config),
        ),
    )


def _retry(upstream: Upstream, config: Config) -> RetryPolicy:
    """Never after a timeout (a silent provider stays silent) nor a reset in flight (it may work)."""
    policy = RetryPolicy(per_try_timeout=parts.seconds(upstream.inference_timeout_s), num_retries=0)
    if config.retry.max_retries > 0:
        policy.retry_on = "retriable-status-codes,connect-failure,reset-before-request"
        policy.retriable_status_codes = [500, 502, 503, 429]
        policy.num_retries = config.retry.max_retries
        policy.retry_back_off = RetryPolicyRetryBackOff(
            base_interval=parts.seconds(config.retry.base_s),
            max_interval=parts.seconds(config.retry.max_s),
        )
        policy.rate_limited_retry_back_off = RetryPolicyRateLimitedRetryBackOff(
            reset_headers=[
                RetryPolicyResetHeader(
                    name="retry-after", format=RetryPolicyResetHeaderFormat.SECONDS
                )
            ],
            max_interval=parts.seconds(RETRY_AFTER_CAP_S),
        )
    return policy


def _mappers(upstream: Upstream) -> list[ResponseMapper]:
    """Names on every failure that Envoy reports by itself.

    tier.lua sees these replies as well, except when it is waiting for a body that broke off.
    """
    who = [
        parts.header(wire_names.UPSTREAM, parts.verbatim(upstream.name)),
        parts.header(wire_names.MODEL, parts.verbatim(upstream.model)),
    ]

    def failure(when: AccessLogFilter, kind: ErrorKind, reason: FallbackReason) -> ResponseMapper:
        return parts.local_reply(when, kind, [*who, parts.header(wire_names.FAIL, reason.value)])

    mappers = [
        parts.local_reply(parts.status_is(413), REQUEST_TOO_LARGE, who),
        *(failure(parts.flagged(flags), kind, reason) for flags, reason, kind in _FLAGS),
        # The sidecar says that a stream's first chunk did not come in time.
        failure(parts.status_is(504), UPSTREAM_TIMEOUT, FallbackReason.TIMEOUT),
        failure(parts.status_at_least(500), GATEWAY_ERROR, FallbackReason.CONNECT_ERROR),
    ]
    if upstream.api_key_file is not None:
        # Envoy was given none: no fault of the client, whose own key was good.
        no_key = failure(parts.status_is(401), GATEWAY_ERROR, FallbackReason.CONNECT_ERROR)
        no_key.status_code = GATEWAY_ERROR.status
        mappers.append(no_key)
    return mappers


def _protocol(upstream: Upstream) -> Any:
    """HTTP/1.1 in clear; over TLS whatever ALPN settles on."""
    http1 = Http1ProtocolOptions()
    options = HttpProtocolOptions(
        common_http_protocol_options=CommonHttpProtocolOptions(idle_timeout=timedelta(seconds=60))
    )
    if upstream.tls:
        options.auto_config = HttpProtocolOptionsAutoHttpConfig(http_protocol_options=http1)
        options.upstream_http_protocol_options = UpstreamHttpProtocolOptions(
            auto_sni=True, auto_san_validation=True
        )
    else:
        options.explicit_http_config = HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=http1
        )
    return parts.pack(options)


def _tls(upstream: Upstream, config: Config) -> TransportSocket:
    """A certificate is wanted that a CA has signed and that names the host of `base_url`."""
    is_ip = parts.is_ip(upstream.host)
    names = CertificateValidationContext(
        match_typed_subject_alt_names=[
            SubjectAltNameMatcher(
                san_type=(
                    SubjectAltNameMatcherSanType.IP_ADDRESS
                    if is_ip
                    else SubjectAltNameMatcherSanType.DNS
                ),
                matcher=StringMatcher(exact=upstream.host),
            )
        ]
    )
    if upstream.ca_file is not None:
        common = files.trusting(upstream, config, names)
    else:
        names.trusted_ca = DataSource(filename=CA_BUNDLE)
        common = CommonTlsContext(validation_context=names)
    # RFC 6066: an address is no server name.
    context = UpstreamTlsContext(sni="" if is_ip else upstream.host, common_tls_context=common)
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=parts.pack(context))
