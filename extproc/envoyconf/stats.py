"""Envoy's own metrics as Prometheus sees them: their labels, and a listener for them alone if asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Final

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType
from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.metrics.v3 import StatsConfig, TagSpecifier
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from extproc.config import Config
from extproc.envoyconf import parts
from extproc.envoyconf.chain import rule_member_name

PATH: Final = "/stats/prometheus"
ADMIN_CLUSTER: Final = "admin"
UPSTREAM_LABEL: Final = "pointsman_upstream"
CHAIN_LABEL: Final = "pointsman_chain"
_MAX_REGEX: Final = 1024
"""Bytes that Envoy allows in one; several may give the same label."""


def labels(config: Config) -> StatsConfig:
    """An upstream's id and a chain's name as labels.

    Envoy takes what stands before the first dot of a cluster's name for the whole of it; the rest
    would become part of the metric's name, and no query could ask for every upstream.
    """
    upstreams = [*config.upstreams, rule_member_name().removeprefix("tier.")]
    of_upstream = r"^(?:cluster\.(?:hosts|tier)|http\.tier|listener\.envoy_internal_tier)"
    return StatsConfig(
        stats_tags=[
            *_label(UPSTREAM_LABEL, of_upstream, upstreams),
            *_label(CHAIN_LABEL, r"^cluster\.chain", [chain.name for chain in config.chains()]),
        ]
    )


def _label(label: str, before: str, names: Iterable[str]) -> Iterator[TagSpecifier]:
    """Names are spelled out, because they may hold dots; the longest first, where one begins another."""
    chunk: list[str] = []
    for name in sorted((re.escape(name) for name in names), key=len, reverse=True):
        if len("|".join([before, *chunk, name])) > _MAX_REGEX - 10:
            yield _tag(label, before, chunk)
            chunk = []
        chunk.append(name)
    yield _tag(label, before, chunk)


def _tag(label: str, before: str, names: Iterable[str]) -> TagSpecifier:
    # Of two groups the outer one leaves the metric's name, and the inner one is the label's value.
    return TagSpecifier(tag_name=label, regex=rf"{before}\.(({'|'.join(names)})\.)")


def listeners(config: Config) -> list[Listener]:
    """GET /stats/prometheus and nothing else: the admin interface behind it can end Envoy."""
    if config.envoy_metrics is None:
        return []
    hcm = HttpConnectionManager(
        stat_prefix="stats",
        generate_request_id=False,
        stream_idle_timeout=timedelta(seconds=30),
        request_timeout=timedelta(seconds=10),
        http_filters=[parts.http_filter("envoy.filters.http.router", Router())],
        route_config=RouteConfiguration(
            virtual_hosts=[
                VirtualHost(
                    name="stats",
                    domains=["*"],
                    routes=[
                        Route(
                            match=RouteMatch(
                                path=PATH,
                                headers=[
                                    HeaderMatcher(
                                        name=":method", string_match=StringMatcher(exact="GET")
                                    )
                                ],
                            ),
                            route=RouteAction(cluster=ADMIN_CLUSTER, timeout=timedelta(seconds=10)),
                        ),
                        Route(
                            match=RouteMatch(prefix="/"),
                            direct_response=DirectResponseAction(
                                status=404, body=DataSource(inline_string=f"GET {PATH}\n")
                            ),
                        ),
                    ],
                )
            ]
        ),
    )
    listen = config.envoy_metrics
    return [
        Listener(
            name="stats",
            address=parts.socket_address(listen.host, listen.port),
            # Full is when it is looked at.
            ignore_global_conn_limit=True,
            per_connection_buffer_limit_bytes=1024 * 1024,
            filter_chains=parts.serving(hcm),
        )
    ]


def clusters(config: Config) -> list[Cluster]:
    """Envoy's admin interface, as this machine reaches it."""
    if config.envoy_metrics is None:
        return []
    admin = config.admin.reachable
    return [
        Cluster(
            name=ADMIN_CLUSTER,
            type=ClusterDiscoveryType.STATIC,
            connect_timeout=timedelta(seconds=1),
            load_assignment=parts.load_assignment(
                ADMIN_CLUSTER, parts.socket_address(admin.host, admin.port)
            ),
        )
    ]
