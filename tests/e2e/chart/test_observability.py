"""What the chart gives to Prometheus and Grafana: the files as they are, and what a value changes in them."""

import json

import pytest
import yaml
from chart_tools import CHART, only, values_of
from prometheus_tools import promtool

RULES = yaml.safe_load((CHART / "files" / "rules.yaml").read_text(encoding="utf-8"))
BOARD = (CHART / "files" / "dashboard.json").read_text(encoding="utf-8")
LOCAL = values_of("minimal")["config"]


def groups_of(manifests):
    return only(manifests, "PrometheusRule")["spec"]["groups"]


def board_of(manifests):
    (board,) = (each for each in manifests if "pointsman.json" in each.get("data", {}))
    return board


def test_nothing_of_it_is_there_by_default(helm):
    manifests = helm.manifests()
    assert not {"PrometheusRule", "PodMonitor"} & {each["kind"] for each in manifests}
    assert [each["kind"] for each in manifests].count("ConfigMap") == 1


def test_rules_arrive_as_they_are_with_the_braces_of_prometheus(helm, tmp_path):
    groups = groups_of(helm.manifests(values={"metrics": {"rules": {"enabled": True}}}))
    assert groups == RULES["groups"]
    assert "{{ $value | humanizePercentage }}" in json.dumps(groups)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    promtool("check", "rules", tmp_path / "rules.yaml")


@pytest.mark.parametrize("base", ["https://git.example/blob/v1", "https://git.example/blob/v1/"])
def test_runbooks_are_found_where_the_repository_is(helm, base):
    values = {"metrics": {"rules": {"enabled": True, "runbookBase": base}}}
    (group,) = groups_of(helm.manifests(values=values))
    alerts = [rule for rule in group["rules"] if "alert" in rule]
    assert {alert["annotations"]["runbook_url"] for alert in alerts} == {
        f"https://git.example/blob/v1/docs/runbooks/{alert['alert']}.md" for alert in alerts
    }


def test_an_alert_can_be_left_out_and_nothing_else_goes_with_it(helm):
    values = {"metrics": {"rules": {"enabled": True, "disabled": ["PointsmanCircuitOpen"]}}}
    (group,) = groups_of(helm.manifests(values=values))
    (full,) = RULES["groups"]
    assert group["rules"] == [
        rule for rule in full["rules"] if rule.get("alert") != "PointsmanCircuitOpen"
    ]


def test_dashboard_arrives_as_it_is_where_grafanas_sidecar_looks(helm):
    board = board_of(helm.manifests(values={"metrics": {"dashboard": {"enabled": True}}}))
    assert json.loads(board["data"]["pointsman.json"]) == json.loads(BOARD)
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize("prefix", ["acme:fallbacks", "acme:fallbacks_total"])
def test_dashboard_asks_for_the_fallback_metric_by_its_configured_name(helm, prefix):
    values = {
        "config": LOCAL | {"fallback": {"metric_prefix": prefix}},
        "metrics": {"dashboard": {"enabled": True}},
    }
    board = json.loads(board_of(helm.manifests(values=values))["data"]["pointsman.json"])
    (variable,) = (each for each in board["templating"]["list"] if each["name"] == "fallback")
    assert variable["query"] == variable["current"]["value"] == "acme:fallbacks_total"


def test_envoys_metrics_are_opened_together_with_what_reads_them(helm):
    values = {
        "config": LOCAL | {"metrics": {"envoy_listen": "0.0.0.0:9999"}},
        "podMonitor": {"enabled": True, "envoy": True},
        "networkPolicy": {"enabled": True},
    }
    manifests = helm.manifests(values=values)
    *_, envoy = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"name": "envoy-metrics", "containerPort": 9999} in envoy["ports"]
    ours, envoys = only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert ours["path"] == "/metrics"
    assert (envoys["port"], envoys["path"]) == ("envoy-metrics", "/stats/prometheus")
    assert envoys["params"] == {
        "filter": [r"^(cluster\.(hosts|extproc)|http\.ingress|access_logs|server)\."]
    }
    opened = json.dumps(only(manifests, "NetworkPolicy")["spec"]["ingress"])
    assert "envoy-metrics" in opened


def test_envoys_metrics_stay_closed_unless_asked_for(helm):
    manifests = helm.manifests(values={"podMonitor": {"enabled": True}})
    config = only(manifests, "ConfigMap")["data"]["pointsman.toml"]
    assert "envoy_listen" not in config
    assert "envoy-metrics" not in json.dumps(manifests)


def test_envoys_metrics_on_loopback_are_refused_with_the_mend(helm):
    values = {
        "config": LOCAL | {"metrics": {"envoy_listen": "127.0.0.1:9466"}},
        "podMonitor": {"enabled": True, "envoy": True},
    }
    assert "which Prometheus cannot reach: leave it out" in helm.refusal(values)
