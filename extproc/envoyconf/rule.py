"""The last resort: an internal listener that answers by itself, in the shape the client asked for."""

from __future__ import annotations

from typing import Any as Json
from typing import Final

import msgspec
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.core.v3 import SubstitutionFormatString
from envoy_data_plane.envoy.config.listener.v3 import (
    Listener,
    ListenerInternalListenerConfig,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    Route,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from extproc.config import Config
from extproc.core import rule, wire_names
from extproc.core.errors import NO_UPSTREAM
from extproc.envoyconf import parts
from extproc.envoyconf.chain import rule_member_name

# JSON has no bare command, so the time takes the place of a value that no answer has.
_CREATED: Final = -1
_ID: Final = "%UNIQUE_ID%"


def member(config: Config) -> Cluster:
    return parts.internal_cluster(
        rule_member_name(),
        rule_member_name(),
        metadata={"name": wire_names.RULE},
        buffer_bytes=parts.held_bytes(config.server.max_body_bytes),
    )


def listener(config: Config) -> Listener:
    text = parts.verbatim(config.fallback.rule_response)
    hcm = HttpConnectionManager(
        codec_type=HttpConnectionManagerCodecType.HTTP1,
        stat_prefix=rule_member_name(),
        generate_request_id=False,
        delayed_close_timeout=parts.DELAYED_CLOSE,
        http_filters=[parts.http_filter("envoy.filters.http.router", Router())],
        route_config=RouteConfiguration(
            virtual_hosts=[
                VirtualHost(
                    name=rule_member_name(),
                    domains=["*"],
                    response_headers_to_add=[
                        parts.header(wire_names.UPSTREAM, wire_names.RULE),
                        parts.header(wire_names.MODEL, rule.MODEL),
                    ],
                    routes=[
                        *_answers(
                            config,
                            paths=rule.CHAT_PATHS,
                            whole=rule.chat(text, id_=_ID, created=_CREATED),
                            chunk=rule.chat(text, id_=_ID, created=_CREATED, chunk=True),
                        ),
                        *_answers(
                            config,
                            paths=rule.COMPLETION_PATHS,
                            whole=rule.completion(text, id_=_ID, created=_CREATED),
                            chunk=rule.completion(text, id_=_ID, created=_CREATED),
                        ),
                        # No canned text passes for an embedding or a model list: an honest error.
                        Route(
                            match=RouteMatch(prefix="/"),
                            request_body_buffer_limit=parts.held_bytes(
                                config.server.max_body_bytes
                            ),
                            direct_response=DirectResponseAction(
                                status=NO_UPSTREAM.status,
                                body_format=parts.error_format(NO_UPSTREAM),
                            ),
                        ),
                    ],
                )
            ]
        ),
    )
    return Listener(
        name=rule_member_name(),
        internal_listener=ListenerInternalListenerConfig(),
        ignore_global_conn_limit=True,  # a request inside is no client connection more
        per_connection_buffer_limit_bytes=parts.held_bytes(config.server.max_body_bytes),
        filter_chains=parts.serving(hcm),
    )


def _answers(
    config: Config, *, paths: str, whole: dict[str, Json], chunk: dict[str, Json]
) -> list[Route]:
    streamed = HeaderMatcher(name=wire_names.STREAM, string_match=StringMatcher(exact="true"))
    events = rule.events(_formatted(chunk))
    return [
        _direct(
            config, paths, [streamed], parts.text_body(events, content_type="text/event-stream")
        ),
        _direct(config, paths, [], parts.text_body(_formatted(whole))),
    ]


def _direct(
    config: Config, paths: str, headers: list[HeaderMatcher], body: SubstitutionFormatString
) -> Route:
    return Route(
        match=RouteMatch(safe_regex=RegexMatcher(regex=paths), headers=headers),
        request_body_buffer_limit=parts.held_bytes(config.server.max_body_bytes),
        direct_response=DirectResponseAction(status=200, body_format=body),
    )


def _formatted(answer: dict[str, Json]) -> str:
    """JSON as an Envoy format string; the values in `answer` are format strings already."""
    text = msgspec.json.encode(answer).decode()
    return text.replace(f'"created":{_CREATED}', '"created":%START_TIME(%s)%')
