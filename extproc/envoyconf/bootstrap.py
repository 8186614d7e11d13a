"""Config -> the whole Envoy bootstrap, as typed messages and as YAML; it starts and reads nothing."""

from __future__ import annotations

from typing import Final

import yaml
from envoy_data_plane.envoy.config.bootstrap.v3 import (
    Admin,
    Bootstrap,
    BootstrapStaticResources,
)
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.core.v3 import Node, TypedExtensionConfig
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.extensions.bootstrap.internal_listener.v3 import InternalListener
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
    DownstreamConnectionsConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from extproc.config import Config
from extproc.envoyconf import chain, ingress, parts, rule, stats, tier, tracing

_ADMIN_PATHS: Final = (
    "/certs",
    "/clusters",
    "/config_dump",
    "/drain_listeners",
    "/listeners",
    "/memory",
    "/ready",
    "/server_info",
    "/stats",
)
"""Of the admin interface: to look, and to drain. Any web page can have a browser on the machine post
to it, and stop Envoy with /quitquitquit, or have it fail its health check."""
MAX_CONNECTIONS: Final = 50_000
"""Client connections at once; Envoy warns at start when nothing bounds them."""


def bootstrap(config: Config) -> Bootstrap:
    chains = config.chains()
    upstreams = list(config.upstreams.values())
    listeners = [ingress.listener(config), *(tier.listener(each, config) for each in upstreams)]
    clusters: list[Cluster] = [ingress.sidecar_cluster(config)]
    clusters += [tier.hosts(each, config) for each in upstreams]
    clusters += [tier.member(each, config) for each in upstreams]
    if any(each.rule for each in chains):
        listeners.append(rule.listener(config))
        clusters.append(rule.member(config))
    clusters += [chain.cluster(each, config) for each in chains]
    clusters += tracing.clusters(config)
    listeners += stats.listeners(config)
    clusters += stats.clusters(config)
    return Bootstrap(
        node=Node(id="pointsman", cluster="pointsman"),
        admin=Admin(
            address=parts.socket_address(config.admin.host, config.admin.port),
            allow_paths=[StringMatcher(prefix=path) for path in _ADMIN_PATHS],
        ),
        bootstrap_extensions=[
            TypedExtensionConfig(
                name="envoy.bootstrap.internal_listener",
                typed_config=parts.pack(InternalListener()),
            )
        ],
        stats_config=stats.labels(config),
        overload_manager=OverloadManager(
            resource_monitors=[
                ResourceMonitor(
                    name="envoy.resource_monitors.global_downstream_max_connections",
                    typed_config=parts.pack(
                        DownstreamConnectionsConfig(
                            max_active_downstream_connections=MAX_CONNECTIONS
                        )
                    ),
                )
            ]
        ),
        static_resources=BootstrapStaticResources(listeners=listeners, clusters=clusters),
    )


def render(config: Config) -> str:
    """The bootstrap as YAML; the same config gives the same bytes."""
    return yaml.dump(
        parts.plain(bootstrap(config)),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


# PyYAML leaves them plain, and Envoy's parser, stricter on YAML 1.1 here, reads booleans.
_YAML_11_BOOLEANS: Final = frozenset("yYnN")
# And these it folds like line ends, wherever it does not escape them.
_YAML_11_BREAKS: Final = frozenset("\x85\u2028\u2029")


class _Dumper(yaml.SafeDumper):
    """Lua as literal blocks, and no anchors where the same value occurs twice."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    if text in _YAML_11_BOOLEANS or _YAML_11_BREAKS & set(text):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
