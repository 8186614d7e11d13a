"""Mode extproc: what Envoy Gateway and Istio are told fits the configuration and their schemas."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from chart_tools import ROOT, only, values_of

from extproc.config import parse
from extproc.supervise import find_envoy

EG = values_of("extproc-envoy-gateway")
ISTIO = values_of("extproc-istio")
PACKAGES = {
    "gateway.networking.k8s.io": "@kubernetes-models/gateway-api",
    "networking.istio.io": "@kubernetes-models/istio",
}

# No package has Envoy Gateway's CRDs. These are the fields that were looked up in them, by hand, in
# its API reference; a field that is not here has not been.
FIELDS = {
    "EnvoyExtensionPolicy": {
        "targetRefs.group targetRefs.kind targetRefs.name",
        "extProc.backendRefs.name extProc.backendRefs.port extProc.failOpen extProc.messageTimeout",
        "extProc.processingMode.request.body extProc.processingMode.response.attributes",
        "extProc.backendSettings.circuitBreaker.maxConnections",
        "extProc.backendSettings.circuitBreaker.maxPendingRequests",
        "extProc.backendSettings.circuitBreaker.maxParallelRequests",
    },
    "BackendTrafficPolicy": {
        "targetRefs.group targetRefs.kind targetRefs.name requestBuffer.limit",
        "retry.numRetries retry.retryOn.triggers retry.retryOn.httpStatusCodes",
        "retry.perRetry.timeout retry.perRetry.backOff.baseInterval",
        "retry.perRetry.backOff.maxInterval timeout.tcp.connectTimeout",
        "circuitBreaker.maxParallelRequests healthCheck.passive.consecutive5XxErrors",
        "healthCheck.passive.interval healthCheck.passive.baseEjectionTime",
        "healthCheck.passive.maxEjectionPercent",
    },
    "Backend": {
        "endpoints.fqdn.hostname endpoints.fqdn.port endpoints.ip.address endpoints.ip.port"
    },
}


def fields(value, path=""):
    if isinstance(value, dict):
        for key, each in value.items():
            yield from fields(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for each in value:
            yield from fields(each, path)
    else:
        yield path


def of_kind(manifests, kind):
    return [each for each in manifests if each["kind"] == kind]


@pytest.mark.parametrize("values", [EG, ISTIO], ids=["envoy-gateway", "istio"])
def test_kinds_with_published_types_have_no_unknown_field(helm4, check_types, values):
    check_types(helm4.manifests(values=values), PACKAGES)


def test_a_wrong_field_would_be_found(helm4, check_types):
    manifests = helm4.manifests(values=ISTIO)
    only(manifests, "VirtualService")["spec"]["http"][0]["retires"] = {}
    with pytest.raises(AssertionError, match="retires"):
        check_types(manifests, PACKAGES)


def test_envoy_gateways_kinds_have_only_fields_that_were_looked_up(helm4):
    manifests = helm4.manifests(values=EG)
    for kind, known in FIELDS.items():
        found = {path for each in of_kind(manifests, kind) for path in fields(each["spec"])}
        assert found
        assert found <= {path for line in known for path in line.split()}


@pytest.mark.parametrize("values", [EG, ISTIO], ids=["envoy-gateway", "istio"])
def test_the_sidecar_is_alone_in_its_pod_and_its_configuration_loads(helm, values):
    manifests = helm.manifests(values=values)
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pointsman"
    assert "lifecycle" not in container  # the process itself says that it ends, and waits
    (init,) = pod["initContainers"]
    assert "pointsman render" not in init["args"][0]
    text = only(manifests, "ConfigMap")["data"]["pointsman.toml"]
    config = parse(text, file="pointsman.toml", environ={})
    (port,) = only(manifests, "Service")["spec"]["ports"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert config.foreign.listen.port == ports[port["targetPort"]] == port["port"] == 9002
    assert pod["terminationGracePeriodSeconds"] > config.foreign.settle_s + 10


def test_tls_of_the_port_is_mounted_and_configured(helm4):
    manifests = helm4.manifests(values=EG)
    config = parse(
        only(manifests, "ConfigMap")["data"]["pointsman.toml"], file="pointsman.toml", environ={}
    )
    assert config.foreign.tls.client_ca_file == "/etc/pointsman-tls/ca.crt"
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "pointsman-tls")
    assert volume["secret"]["secretName"] == "pointsman-tls"
    assert only(manifests, "Service")["spec"]["ports"][0]["appProtocol"] == "grpc"
    plain = only(helm4.manifests(values=ISTIO), "Service")
    assert plain["spec"]["ports"][0]["appProtocol"] == "kubernetes.io/h2c"


def test_envoy_gateway_has_a_route_for_each_upstream_and_one_for_what_is_undecided(helm4):
    manifests = helm4.manifests(values=EG)
    routes = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "HTTPRoute")}
    chosen = {}
    for name, spec in routes.items():
        (rule,) = spec["rules"]
        (match,) = rule["matches"]
        (backend,) = rule["backendRefs"]
        value = match["headers"][0]["value"] if "headers" in match else None
        chosen[value] = (name, backend, rule)
    config = EG["config"]["upstream"]
    assert chosen.keys() == {None, *(each.get("name", id_) for id_, each in config.items())}
    service = {"name": "vllm", "namespace": "models", "port": 8000}
    assert chosen["coder"][1] == chosen[None][1] == service
    rewrite = chosen["big"][2]["filters"][1]["urlRewrite"]
    assert rewrite["hostname"] == "llm.example"
    assert rewrite["path"]["replacePrefixMatch"] == "/api"
    backends = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "Backend")}
    assert backends[chosen["big"][1]["name"]]["endpoints"] == [
        {"fqdn": {"hostname": "llm.example", "port": 443}}
    ]
    assert backends[chosen["lan"][1]["name"]]["endpoints"] == [
        {"ip": {"address": "10.1.2.3", "port": 8000}}
    ]
    policy = only(manifests, "EnvoyExtensionPolicy")["spec"]
    assert {each["name"] for each in policy["targetRefs"]} == routes.keys()
    (ext_proc,) = policy["extProc"]
    assert (ext_proc["messageTimeout"], ext_proc["failOpen"]) == ("1s", True)
    traffic = {
        each["spec"]["targetRefs"][0]["name"]: each["spec"]
        for each in of_kind(manifests, "BackendTrafficPolicy")
    }
    assert traffic.keys() == routes.keys()
    big = traffic[chosen["big"][0]]
    assert big["retry"]["perRetry"] == {
        "timeout": "120s",
        "backOff": {"baseInterval": "100ms", "maxInterval": "1s500ms"},
    }
    assert big["healthCheck"]["passive"]["baseEjectionTime"] == "90s"
    assert big["requestBuffer"]["limit"] == str(3 * 2**19)
    tls = only(manifests, "BackendTLSPolicy")["spec"]
    assert tls["targetRefs"][0]["name"] == chosen["big"][1]["name"]


def test_istio_has_a_route_for_each_upstream_and_one_entry_for_each_host(helm4):
    manifests = helm4.manifests(values=ISTIO)
    service = only(manifests, "VirtualService")["spec"]
    *named, undecided = service["http"]
    by_name = {each["match"][0]["headers"]["x-pointsman-upstream"]["exact"]: each for each in named}
    assert by_name.keys() == {"coder", "big", "small"}
    assert "headers" not in undecided["match"][0]
    assert undecided["route"] == by_name["small"]["route"]
    assert by_name["coder"]["route"][0]["destination"] == {
        "host": "vllm.default.svc.cluster.local",
        "port": {"number": 8000},
    }
    assert by_name["coder"]["retries"]["perTryTimeout"] == "1s500ms"
    assert by_name["big"]["rewrite"] == {"uri": "/api/", "authority": "llm.example"}
    # Without an attempt Istio would forget the time of a try; this one never repeats an answer.
    assert by_name["big"]["retries"]["attempts"] == 1
    assert by_name["big"]["retries"]["retryOn"] == "connect-failure,refused-stream"
    (entry,) = of_kind(manifests, "ServiceEntry")
    (rule,) = of_kind(manifests, "DestinationRule")
    assert entry["spec"]["hosts"] == [rule["spec"]["host"]] == ["llm.example"]
    (port,) = rule["spec"]["trafficPolicy"]["portLevelSettings"]
    assert port["tls"] == {"mode": "SIMPLE", "sni": "llm.example"}
    assert port["outlierDetection"]["consecutive5xxErrors"] == 5
    envoy_filter = only(manifests, "EnvoyFilter")
    assert envoy_filter["metadata"]["namespace"] == "istio-ingress"
    patched = {
        each["match"]["routeConfiguration"]["vhost"]["route"]["name"]
        for each in envoy_filter["spec"]["configPatches"]
        if each["applyTo"] == "HTTP_ROUTE"
    }
    assert patched == {each["name"] for each in service["http"]}


@pytest.mark.envoy
def test_what_istio_patches_in_is_valid_for_envoy(helm4, tmp_path):
    """The example's bootstrap with the filter and the routes' switch as the EnvoyFilter has them."""
    patches = only(helm4.manifests(values=ISTIO), "EnvoyFilter")["spec"]["configPatches"]
    by_kind = {each["applyTo"]: each["patch"]["value"] for each in patches}
    example = ROOT / "envoy" / "examples" / "external.yaml"
    bootstrap = yaml.safe_load(example.read_text(encoding="utf-8"))
    (listener,) = bootstrap["static_resources"]["listeners"]
    listener |= by_kind["LISTENER"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    ext_proc = copy.deepcopy(by_kind["HTTP_FILTER"])
    where = ext_proc["typed_config"]["grpc_service"]["envoy_grpc"]
    assert where["cluster_name"] == "outbound|9002||gw-pointsman.default.svc.cluster.local"
    where["cluster_name"] = "pointsman"
    manager["http_filters"][0] = ext_proc
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route.update(by_kind["HTTP_ROUTE"])
    path: Path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(bootstrap), encoding="utf-8")
    done = subprocess.run(
        [str(find_envoy()), "--mode", "validate", "-c", str(path), "--log-level", "error"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_network_policy_lets_the_named_ones_to_the_port_and_kubelets_to_the_probe(helm4):
    policy = only(helm4.manifests(values=EG), "NetworkPolicy")["spec"]
    asking, probing, scraping = policy["ingress"]
    assert asking["ports"] == [{"port": "grpc", "protocol": "TCP"}]
    assert asking["from"] == EG["networkPolicy"]["from"]
    assert probing == {"ports": [{"port": "health", "protocol": "TCP"}]}
    assert scraping["ports"] == [{"port": "metrics", "protocol": "TCP"}]


def test_the_examples_of_the_documentation_render(helm, validate):
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    doc = re.split(r"^##", text.split("### Mode extproc")[1], maxsplit=1, flags=re.MULTILINE)[0]
    first, second = (
        yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", doc, re.DOTALL)
    )
    for values, kind in ((first, "EnvoyExtensionPolicy"), (first | second, "EnvoyFilter")):
        text = helm.template(values=values)
        validate(text, "1.37")
        assert f"kind: {kind}" in text


ONE = {"upstream": {"x": {"base_url": "http://x.example", "model": "m"}}}


def extproc(**more):
    return {"mode": "extproc", "config": ONE, "extproc": more}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "extproc"}, "mode extproc needs a config"),
        (extproc(target="envoy-gateway"), "needs extproc.envoyGateway.parentRefs"),
        (extproc(target="istio", hostnames=["x.example"]), "needs extproc.istio.gateways"),
        (extproc(default="y"), "extproc.default: there is no config.upstream.y"),
        (extproc(backends={"y": {"name": "s", "port": 1}}), "extproc.backends.y: there is no"),
        (extproc(clientCA=True), "extproc.clientCA needs extproc.tlsSecret"),
        (
            {
                "mode": "extproc",
                "config": {"upstream": {"x": ONE["upstream"]["x"] | {"api_key_env": "K"}}},
                "apiKeys": {"K": {"secret": "s", "key": "k"}},
            },
            "config.upstream.x.api_key_env has no effect in mode extproc",
        ),
        (
            {"mode": "extproc", "config": ONE, "podMonitor": {"enabled": True, "envoy": True}},
            "podMonitor.envoy has no Envoy to ask in mode extproc",
        ),
        (
            {"mode": "extproc", "config": ONE, "auth": {"secret": "s"}},
            "auth.secret has no effect in mode extproc",
        ),
        (
            {
                "mode": "extproc",
                "config": {"upstream": {"x": {"base_url": "http://10.0.0.1", "model": "m"}}},
                "extproc": {
                    "target": "istio",
                    "hostnames": ["x.example"],
                    "istio": {"gateways": ["g"]},
                },
            },
            "a ServiceEntry needs a name",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_with_its_mend(helm4, values, said):
    assert said in helm4.refusal(values)


@pytest.mark.parametrize(
    ("deadline", "timeout"),
    [
        ("150ms", "750ms"),
        ("0.4s", "1s"),
        ("1.5m", "90s600ms"),
        ("1ms", "601ms"),
        ("2h", "7200s600ms"),
    ],
)
def test_times_reach_the_gateway_api_without_fractions(helm4, deadline, timeout):
    values = extproc(target="envoy-gateway", envoyGateway={"parentRefs": [{"name": "g"}]})
    values["config"] = ONE | {"router": {"deadline": deadline}}
    policy = only(helm4.manifests(values=values), "EnvoyExtensionPolicy")["spec"]
    assert policy["extProc"][0]["messageTimeout"] == timeout
