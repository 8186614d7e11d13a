"""Grafana's dashboard, as JSON: what it shows and how that is asked; only here is Grafana known.

Built with Grafana's own types for 11.6, so that a misspelt field fails in Python. Nothing names an
install: data source, job and instance are variables, and so is the fallback metric, whose name is a key
of the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import common as show
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from extproc.config import Fallback

UID: Final = "pointsman"
_SOURCE: Final = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
_OURS: Final = 'job=~"$job",instance=~"$instance"'
_JOBS: Final = 'job=~"$job"'
"""For Envoy, which listens on another port and so is another instance."""
_INGRESS: Final = f'envoy_http_conn_manager_prefix="ingress",{_JOBS}'
_HOSTS: Final = f'envoy_cluster_name="hosts",{_JOBS}'
FALLBACK_DEFAULT: Final = Fallback().metric_prefix
NEEDS_ENVOY: Final = "Needs the scrape of Envoy."


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: expression by legend."""

    title: str
    queries: Mapping[str, str]
    unit: str = "reqps"
    says: str = ""
    stacked: bool = False
    width: int = 8
    is_stat: bool = False
    limit: float | None = None
    """Of a stat: from here on it is red."""
    states: Mapping[int, tuple[str, str]] | None = None
    """Text and colour of each value; then the panel is a timeline of states."""


def _ours(metric: str, *more: str) -> str:
    return f"{metric}{{{','.join([_OURS, *more])}}}"


def _rate(metric: str, *more: str, by: str = "") -> str:
    of = f" by ({by}) " if by else ""
    return f"sum{of}(rate({_ours(metric, *more)}[$__rate_interval]))"


def _envoy_rate(metric: str, labels: str, *, by: str = "") -> str:
    of = f" by ({by}) " if by else ""
    return f"sum{of}(rate({metric}{{{labels}}}[$__rate_interval]))"


def _of_jobs(metric: str, *more: str) -> str:
    return f"{metric}{{{','.join([_JOBS, *more])}}}"


def _less(*series: str) -> str:
    return " - ".join(f"sum({each})" for each in series)


def _quantiles(metric: str, *quantiles: float, by: str = "") -> dict[str, str]:
    of = f"{{{{{by}}}}} " if by else ""
    buckets = _rate(f"{metric}_bucket", by=f"le, {by}" if by else "le")
    return {
        f"{of}p{round(quantile * 100)}": f"histogram_quantile({quantile:g}, {buckets})"
        for quantile in quantiles
    }


_OWED: Final = _rate("pointsman_requests_total", 'outcome!~"rejected|client_gone"')
_FELL_BACK: Final = _rate(
    "pointsman_requests_total", 'outcome=~"served_by_fallback|served_by_rule"'
)
_FAILED: Final = _rate("pointsman_requests_total", 'outcome="failed"')
_HITS: Final = _rate("pointsman_decision_cache_total", 'result="hit"')
_UNTOLD: Final = _rate("pointsman_answers_total", 'usage="absent"', by="upstream")

# The account's equations, as docs/observability.md has them: Envoy's side less the sidecars'. Of whole
# jobs, because Envoy's instances have other names than the sidecars'.
_REQUESTS_MISSING: Final = _less(
    f"envoy_http_downstream_rq_total{{{_INGRESS}}}",
    f"envoy_http_downstream_rq_active{{{_INGRESS}}}",
    _of_jobs("pointsman_requests_total"),
    _of_jobs("pointsman_requests_unseen_total"),
    _of_jobs("pointsman_account_offset", 'of="requests"'),
)
_BYPASSED_MISSING: Final = (
    _less(
        f"envoy_http_ext_proc_failure_mode_allowed{{{_INGRESS}}}",
        _of_jobs("pointsman_decisions_total", 'reason="degraded_bypassed"'),
        _of_jobs("pointsman_requests_unseen_total", 'cause="bypassed"'),
        _of_jobs("pointsman_account_offset", 'of="bypassed"'),
    )
    + f" + sum({_of_jobs('pointsman_internal_errors_total')})"
)
_RECORDS_MISSING: Final = _less(
    _of_jobs("envoy_access_logs_grpc_access_log_logs_written"),
    _of_jobs("pointsman_records_total"),
    _of_jobs("pointsman_records_lost_total"),
    _of_jobs("pointsman_account_offset", 'of="records"'),
)

_CIRCUIT: Final = {0: ("closed", "green"), 1: ("half-open", "yellow"), 2: ("open", "red")}


def _stat(title: str, expr: str, unit: str, limit: float | None = None, says: str = "") -> Panel:
    return Panel(title, {title: expr}, unit, says, width=4, is_stat=True, limit=limit)


ROWS: Final[Sequence[tuple[str, Sequence[Panel]]]] = (
    (
        "Now",
        (
            _stat("Requests", _rate("pointsman_requests_total"), "reqps"),
            _stat(
                "Fallback share",
                f"{_FELL_BACK} / {_OWED}",
                "percentunit",
                0.05,
                "Answered by another upstream than the route's first, or by the rule.",
            ),
            _stat(
                "Failed share",
                f"{_FAILED} / {_OWED}",
                "percentunit",
                0.01,
            ),
            _stat(
                "Open circuits",
                f"sum({_ours('pointsman_circuit_state')} == bool 2)",
                "short",
                1,
                "Of all pods.",
            ),
            _stat(
                "Requests unseen",
                f"sum(increase({_ours('pointsman_requests_unseen_total')}[$__range]))",
                "short",
                1,
                "Ended in Envoy without a record, in the time shown.",
            ),
            _stat(
                "Alerts",
                'count(ALERTS{alertname=~"Pointsman.*",alertstate="firing"}) or vector(0)',
                "short",
                1,
                "Those of the rules that come with Pointsman.",
            ),
        ),
    ),
    (
        "Requests",
        (
            Panel(
                "Requests by outcome",
                {"{{outcome}}": _rate("pointsman_requests_total", by="outcome")},
                stacked=True,
                width=12,
            ),
            Panel(
                "Requests by route",
                {"{{route}}": _rate("pointsman_decisions_total", by="route")},
                stacked=True,
                width=12,
            ),
        ),
    ),
    (
        "Fallbacks and circuits",
        (
            Panel(
                "Fallbacks by reason", {"{{reason}}": _rate("$fallback", by="reason")}, stacked=True
            ),
            Panel(
                "Fallbacks by step",
                {"{{from}} to {{to}}": _rate("$fallback", by="from, to")},
                stacked=True,
            ),
            Panel(
                "Circuits",
                {"{{upstream}}": f"max by (upstream) ({_ours('pointsman_circuit_state')})"},
                unit="short",
                says="The worst of all pods.",
                states=_CIRCUIT,
            ),
        ),
    ),
    (
        "Decisions",
        (
            Panel(
                "Decisions by reason",
                {"{{reason}}": _rate("pointsman_decisions_total", by="reason")},
                stacked=True,
            ),
            Panel(
                "Decision latency",
                {
                    **_quantiles("pointsman_decision_seconds", 0.5, 0.95, 0.99),
                    "deadline": f"max({_ours('pointsman_decision_deadline_seconds')})",
                },
                unit="s",
                says="From the body in the sidecar to the decision.",
            ),
            Panel("Refusals", {"{{code}}": _rate("pointsman_rejections_total", by="code")}),
        ),
    ),
    (
        "Embedding",
        (
            Panel(
                "Queue",
                {
                    "waiting {{instance}}": f"max by (instance) ({_ours('pointsman_queue_depth')})",
                    "limit": f"max({_ours('pointsman_queue_limit')})",
                },
                unit="short",
            ),
            Panel(
                "Time of a prompt",
                {
                    **{
                        f"wait {legend}": expr
                        for legend, expr in _quantiles("pointsman_queue_seconds", 0.5, 0.95).items()
                    },
                    **{
                        f"embed {legend}": expr
                        for legend, expr in _quantiles("pointsman_embed_seconds", 0.5, 0.95).items()
                    },
                },
                unit="s",
            ),
            Panel(
                "Never embedded",
                {"{{cause}}": _rate("pointsman_queue_skipped_total", by="cause")},
                says="Their time was up, or too short for the queue, or nobody waited any more.",
            ),
            Panel(
                "Workers",
                {
                    "workers": f"sum({_ours('pointsman_workers')})",
                    "replaced in 15 m: {{cause}}": "sum by (cause) "
                    f"(increase({_ours('pointsman_worker_restarts_total')}[15m]))",
                },
                unit="short",
            ),
            Panel(
                "Remembered decisions",
                {"hit ratio": f"{_HITS} / {_rate('pointsman_decision_cache_total')}"},
                unit="percentunit",
                says="Prompts whose decision was remembered.",
            ),
            Panel(
                "Cascade",
                {"{{encoder}}": _rate("pointsman_cascade_total", by="encoder")},
                says="Which encoder decided, with `[router] cascade`; 0 without it.",
            ),
        ),
    ),
    (
        "Upstreams",
        (
            Panel(
                "Time to headers",
                _quantiles("pointsman_time_to_headers_seconds", 0.5, 0.95, by="upstream"),
                unit="s",
            ),
            Panel(
                "Time to first token",
                _quantiles("pointsman_time_to_first_token_seconds", 0.5, 0.95, by="upstream"),
                unit="s",
                says="Of streams.",
            ),
            Panel(
                "Gap between tokens",
                _quantiles("pointsman_token_gap_seconds", 0.5, 0.95, by="upstream"),
                unit="s",
                says="Of streams that report their usage: the mean of each.",
            ),
            Panel(
                "Tokens",
                {"{{upstream}} {{kind}}": _rate("pointsman_tokens_total", by="upstream, kind")},
                unit="short",
                says="A second, as the upstreams report them.",
                stacked=True,
            ),
            Panel(
                "Tokens by route",
                {"{{route}} {{kind}}": _rate("pointsman_tokens_total", by="route, kind")},
                unit="short",
                says="A second.",
                stacked=True,
            ),
            Panel(
                "Answers without usage",
                {"{{upstream}}": f"{_UNTOLD} / {_rate('pointsman_answers_total', by='upstream')}"},
                unit="percentunit",
                says="Their tokens are counted nowhere.",
            ),
        ),
    ),
    (
        "Audit",
        (
            Panel(
                "Envoy's total less ours",
                {
                    "requests": _REQUESTS_MISSING,
                    "bypassed": _BYPASSED_MISSING,
                    "records": _RECORDS_MISSING,
                },
                unit="short",
                says="0 when nothing is under way. The two are scraped at different moments, so under "
                "traffic it wavers about 0; what stays away from 0 is missing. The exact figures: "
                f"`pointsman audit`. {NEEDS_ENVOY}",
                width=12,
            ),
            Panel(
                "Unseen by cause",
                {
                    "requests, {{cause}}": _rate("pointsman_requests_unseen_total", by="cause"),
                    "records lost": _rate("pointsman_records_lost_total"),
                },
                says="What the sidecar itself found missing.",
                width=6,
            ),
            Panel(
                "Readings of Envoy's counters",
                {"{{result}}": _rate("pointsman_envoy_reads_total", by="result")},
                unit="ops",
                says="Where they fail, nothing missing is found.",
                width=6,
            ),
        ),
    ),
    (
        "Envoy",
        (
            Panel(
                "Under way",
                {
                    "requests": f"sum(envoy_http_downstream_rq_active{{{_INGRESS}}})",
                    "connections": f"sum(envoy_http_downstream_cx_active{{{_INGRESS}}})",
                },
                unit="short",
                says=NEEDS_ENVOY,
            ),
            Panel(
                "Retries on the same upstream",
                {
                    "{{pointsman_upstream}}": _envoy_rate(
                        "envoy_cluster_upstream_rq_retry", _HOSTS, by="pointsman_upstream"
                    ),
                    "{{pointsman_upstream}}, over budget": _envoy_rate(
                        "envoy_cluster_upstream_rq_retry_overflow", _HOSTS, by="pointsman_upstream"
                    ),
                },
                says=NEEDS_ENVOY,
            ),
            Panel(
                "Calls to the sidecar that went wrong",
                {
                    "bypassed": _envoy_rate("envoy_http_ext_proc_failure_mode_allowed", _INGRESS),
                    "timed out": _envoy_rate("envoy_http_ext_proc_message_timeouts", _INGRESS),
                },
                says=NEEDS_ENVOY,
            ),
        ),
    ),
    (
        "Sidecar process",
        (
            Panel(
                "CPU",
                {"{{instance}}": _rate("process_cpu_seconds_total", by="instance")},
                unit="short",
                says="Cores; the workers are processes of their own.",
            ),
            Panel(
                "Memory",
                {"{{instance}}": f"max by (instance) ({_ours('process_resident_memory_bytes')})"},
                unit="bytes",
            ),
            Panel(
                "Up for",
                {
                    "{{instance}}": f"time() - max by (instance) ({_ours('process_start_time_seconds')})"
                },
                unit="s",
            ),
        ),
    ),
)


def document() -> str:
    """The dashboard, as Grafana imports it."""
    board = (
        build.Dashboard("Pointsman")
        .uid(UID)
        .description("LLM traffic through Pointsman: outcomes, fallbacks, decisions, upstreams.")
        .tags(["pointsman", "llm", "envoy"])
        .editable()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
    )
    for variable in _variables():
        board.with_variable(variable)
    for title, panels in ROWS:
        board.with_row(build.Row(title))
        for panel in panels:
            board.with_panel(_panel(panel))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variables() -> Sequence[
    build.DatasourceVariable | build.QueryVariable | build.TextBoxVariable
]:
    every = dashboard.VariableOption(text="All", value="$__all")

    def of_label(name: str, query: str) -> build.QueryVariable:
        return (
            build.QueryVariable(name)
            .label(name.capitalize())
            .datasource(_SOURCE)
            .query(query)
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(every)
        )

    # Both metrics: where Envoy is scraped under a job of its own, that is to be chosen too.
    either = '{__name__=~"pointsman_requests_total|envoy_http_ext_proc_streams_started"}'
    return (
        build.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        of_label("job", f"label_values({either}, job)"),
        of_label("instance", 'label_values(pointsman_requests_total{job=~"$job"}, instance)'),
        build.TextBoxVariable("fallback")
        .label("Fallback metric")
        .description("[fallback] metric_prefix, ending in _total.")
        .default_value(FALLBACK_DEFAULT)
        .current(dashboard.VariableOption(text=FALLBACK_DEFAULT, value=FALLBACK_DEFAULT)),
    )


def _panel(panel: Panel) -> stat.Panel | statetimeline.Panel | timeseries.Panel:
    built: stat.Panel | statetimeline.Panel | timeseries.Panel
    built = _stat_panel(panel) if panel.is_stat else _lines_panel(panel)
    if panel.states is not None:
        built = _states_panel(panel.states)
    built.title(panel.title).datasource(_SOURCE).span(panel.width).unit(panel.unit)
    if panel.says:
        built.description(panel.says)
    for ref, (legend, expr) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref)
        built.with_target(query.datasource(_SOURCE).instant() if panel.is_stat else query.range())
    return built


def _stat_panel(panel: Panel) -> stat.Panel:
    steps = [dashboard.Threshold(color="green")]
    if panel.limit is not None:
        steps.append(dashboard.Threshold(value=panel.limit, color="red"))
    limits = build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
    return stat.Panel().thresholds(limits).graph_mode(common.BigValueGraphMode.AREA).height(4)


def _states_panel(states: Mapping[int, tuple[str, str]]) -> statetimeline.Panel:
    return (
        statetimeline.Panel()
        .mappings(
            [
                dashboard.ValueMap(
                    options={
                        str(value): dashboard.ValueMappingResult(
                            text=text, color=color, index=value
                        )
                        for value, (text, color) in states.items()
                    }
                )
            ]
        )
        .height(8)
    )


def _lines_panel(panel: Panel) -> timeseries.Panel:
    lines = (
        timeseries.Panel()
        .legend(show.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM))
        .tooltip(show.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
        .fill_opacity(10)
        .height(8)
    )
    if panel.stacked:
        lines.stacking(show.StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(40)
    return lines
