"""Configuration and the utterances' vectors -> the router's plan; it embeds nothing and serves nobody."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.config import Config, Route, UnknownModel, route_chain, upstream_chain
from extproc.core.exchange import ChainPlan, Plan
from extproc.core.routing import ModelDirectory, RouteRule, SemanticIndex, Vectors, calibrated
from extproc.core.signals import SignalTable


def compile_plan(config: Config, vectors: Mapping[str, Vectors] | None) -> Plan:
    """`vectors`: the embedded utterances of each route that has any; None: not known yet."""
    chains = {
        chain.name: ChainPlan(
            chain.name,
            chain.upstreams,
            tuple(config.upstreams[upstream].model for upstream in chain.upstreams),
        )
        for chain in config.chains()
    }
    return Plan(
        directory=ModelDirectory(
            aliases=config.router.aliases,
            upstreams={each.id: (each.name, each.model) for each in config.upstreams.values()},
            routes=[route.name for route in config.routes],
        ),
        signals=SignalTable([_rule(route) for route in config.routes]),
        index=semantic_index(config, vectors),
        default_route=config.router.default,
        unknown_model_takes_default=config.router.unknown_model is UnknownModel.DEFAULT,
        route_chains={route.name: chains[route_chain(route.name)] for route in config.routes},
        upstream_chains={each: chains[upstream_chain(each)] for each in config.upstreams},
        max_body_bytes=config.server.max_body_bytes,
    )


def semantic_index(config: Config, vectors: Mapping[str, Vectors] | None) -> SemanticIndex:
    """`vectors`: see `compile_plan`. Its rules have their thresholds, estimated here and nowhere else."""
    rules = [_rule(route) for route in config.routes]
    return SemanticIndex(rules if vectors is None else calibrated(rules, vectors), vectors)


def needs_encoder(config: Config) -> bool:
    return any(route.utterances for route in config.routes)


def _rule(route: Route) -> RouteRule:
    return RouteRule(
        name=route.name,
        utterances=route.utterances,
        keywords=route.keywords,
        threshold=route.threshold,
        patterns=route.patterns,
        headers=route.headers,
        has=route.has,
        min_chars=route.min_chars,
        max_chars=route.max_chars,
        priority=route.priority,
    )
