"""A chain: the aggregate cluster that gives each attempt to the next tier, and the route to it."""

from __future__ import annotations

from datetime import timedelta

from envoy_data_plane.envoy.config.cluster.v3 import (
    Cluster,
    ClusterCustomClusterType,
    ClusterLbPolicy,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as MutationRule
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryPriority,
    Route,
    RouteAction,
    RouteMatch,
)
from envoy_data_plane.envoy.extensions.clusters.aggregate.v3 import ClusterConfig
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import (
    HeaderMutation,
    Mutations,
)
from envoy_data_plane.envoy.extensions.filters.http.upstream_codec.v3 import UpstreamCodec
from envoy_data_plane.envoy.extensions.retry.priority.previous_priorities.v3 import (
    PreviousPrioritiesConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from extproc.config import Chain, Config
from extproc.core import wire_names
from extproc.envoyconf import lua, parts, tier


def cluster_name(chain: Chain) -> str:
    return f"chain.{chain.name}"


def cluster(chain: Chain, config: Config) -> Cluster:
    names = [config.upstreams[upstream].name for upstream in chain.upstreams]
    members = [tier.member_name(config.upstreams[upstream]) for upstream in chain.upstreams]
    if chain.rule:
        names.append(wire_names.RULE)
        members.append(rule_member_name())
    name = cluster_name(chain)
    who = HeaderMutation(
        mutations=Mutations(
            request_mutations=[
                MutationRule(
                    append=parts.header(
                        wire_names.UPSTREAM, f"%UPSTREAM_METADATA({wire_names.METADATA}:name)%"
                    )
                )
            ]
        )
    )
    script = lua.source("chain.lua", {"members": "," + ",".join(names) + ","})
    return Cluster(
        name=name,
        connect_timeout=timedelta(seconds=1),
        per_connection_buffer_limit_bytes=parts.held_bytes(config.server.max_body_bytes),
        circuit_breakers=parts.concurrency(parts.UNLIMITED),
        lb_policy=ClusterLbPolicy.CLUSTER_PROVIDED,
        cluster_type=ClusterCustomClusterType(
            name="envoy.clusters.aggregate",
            typed_config=parts.pack(ClusterConfig(clusters=members)),
        ),
        # The aggregate's own upstream filters run, once per attempt; its members' do not.
        typed_extension_protocol_options={
            parts.HTTP_OPTIONS: parts.http1_options(
                [
                    parts.http_filter("who", who),
                    parts.lua_filter("attempts", name, script),
                    parts.http_filter("envoy.filters.http.upstream_codec", UpstreamCodec()),
                ]
            )
        },
    )


def rule_member_name() -> str:
    return f"tier.@{wire_names.RULE}"  # no upstream id can hold an @


def route(chain: Chain, config: Config, *, is_default: bool = False) -> Route:
    """The ingress route to a chain; `is_default` also takes what names none.

    An attempt is retried on the next member exactly when its tier labelled it a failure, so that
    the rule and a client's own error are final whatever their status.
    """
    upstreams = [config.upstreams[upstream] for upstream in chain.upstreams]
    members = len(upstreams) + chain.rule
    visits = [config.visit_limit_s(upstream) for upstream in upstreams]
    idle = (
        max([tier.idle_timeout_s(upstream, config) for upstream in upstreams] + [sum(visits)]) + 1
    )
    whole = config.server.request_timeout_s
    match = RouteMatch(prefix="/")
    if not is_default:
        match.headers = [
            HeaderMatcher(name=wire_names.CHAIN, string_match=StringMatcher(exact=chain.name))
        ]
    return Route(
        name=chain.name,
        match=match,
        request_body_buffer_limit=parts.held_bytes(config.server.max_body_bytes),
        route=RouteAction(
            cluster=cluster_name(chain),
            timeout=timedelta() if whole is None else parts.seconds(whole),
            idle_timeout=parts.seconds(idle),
            retry_policy=RetryPolicy(
                retry_on="retriable-headers,connect-failure,refused-stream,reset",
                retriable_headers=[HeaderMatcher(name=wire_names.FAIL, present_match=True)],
                num_retries=members - 1,
                # A backstop only: the tiers run out of time first.
                per_try_timeout=parts.seconds(max(visits) + 1),
                # Going to another upstream needs no wait.
                retry_back_off=RetryPolicyRetryBackOff(
                    base_interval=timedelta(milliseconds=1), max_interval=timedelta(milliseconds=2)
                ),
                retry_priority=RetryPolicyRetryPriority(
                    name="envoy.retry_priorities.previous_priorities",
                    typed_config=parts.pack(PreviousPrioritiesConfig(update_frequency=1)),
                ),
            ),
        ),
    )
