"""The chart as Helm renders it: it passes every checker, says what the values say, and refuses the rest."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from chart_tools import CHART, TOOLS, only, tool, values_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kubernetes_rules import check

from extproc.config import parse
from extproc.drill.plan import DrillFault

OTHERS = ("extproc-envoy-gateway", "extproc-istio")
VALUES = {"default": {}} | {name: values_of(name) for name in ("minimal", "full", *OTHERS)}
UPSTREAM = {"base_url": "http://x.example", "model": "m"}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_lints(helm, values):
    done = helm.run("lint", "--strict", str(CHART), values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kubernetes", ["1.27", "1.37"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_is_valid_for_kubernetes(helm, validate, values, kubernetes):
    text = helm.template("--kube-version", kubernetes, values=values)
    validate(text, kubernetes)
    check(text)


def test_custom_resources_are_of_the_operators_types(helm):
    """Unknown fields too: the operator's own CRDs would drop them without a word."""
    tool("kubernetes-validate")
    done = subprocess.run(
        [TOOLS / "venv" / "bin" / "python", Path(__file__).with_name("operator_types.py")],
        input=helm.template(values=VALUES["full"]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"PodMonitor", "PrometheusRule"} <= set(done.stdout.split())


def test_http_route_is_of_the_gateway_apis_type(helm4, check_types):
    manifests = helm4.manifests(values=VALUES["full"])
    check_types(manifests, {"gateway.networking.k8s.io": "@kubernetes-models/gateway-api"})


ALWAYS = {"ConfigMap", "Deployment", "Pod", "PodDisruptionBudget", "Service", "ServiceAccount"}
OPTIONAL = {
    "HTTPRoute",
    "HorizontalPodAutoscaler",
    "Ingress",
    "NetworkPolicy",
    "PodMonitor",
    "PrometheusRule",
}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (VALUES["default"], ALWAYS),
        (VALUES["minimal"], ALWAYS),
        (VALUES["full"], ALWAYS | OPTIONAL),
        (VALUES["full"] | {"mode": "sidecar"}, {"ConfigMap", "PrometheusRule"}),
    ],
)
def test_what_is_installed(helm, values, kinds):
    assert {each["kind"] for each in helm.manifests(values=values)} == kinds


def test_what_is_optional_says_what_the_values_say(helm):
    values, manifests = VALUES["full"], helm.manifests(values=VALUES["full"])
    scaler = only(manifests, "HorizontalPodAutoscaler")["spec"]
    (cpu, depth) = scaler["metrics"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 30)
    assert cpu["resource"]["target"] == {"type": "Utilization", "averageUtilization": 60}
    assert depth["pods"]["metric"] == {"name": "pointsman_queue_depth"}
    assert depth["pods"]["target"] == {"type": "AverageValue", "averageValue": "20"}
    assert only(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 2
    deployment = only(manifests, "Deployment")["spec"]
    assert "replicas" not in deployment
    pod = deployment["template"]["spec"]
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"
    assert spread["labelSelector"] == deployment["selector"]
    policy = only(manifests, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == values["networkPolicy"]["egress"]
    requests, health, metrics = policy["ingress"]
    (test,) = (each for each in manifests if each["metadata"]["name"] == "llm-gateway-test")
    admitted, tests = requests["from"]
    assert admitted == values["networkPolicy"]["from"][0]
    assert tests["podSelector"]["matchLabels"].items() <= test["metadata"]["labels"].items()
    assert "from" not in health  # kubelets ask from their nodes
    assert metrics["from"] == values["networkPolicy"]["metricsFrom"]
    account = only(manifests, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == account["metadata"]["name"] == "gateway"
    ingress = only(manifests, "Ingress")["spec"]
    assert [rule["host"] for rule in ingress["rules"]] == ["llm.example"]
    route = only(manifests, "HTTPRoute")["spec"]
    assert route["parentRefs"] == values["httpRoute"]["parentRefs"]
    (rule,) = route["rules"]
    assert rule["backendRefs"] == [{"name": "llm-gateway", "port": 8080}]
    assert rule["timeouts"] == {"request": "0s"}


def test_queue_depth_scales_only_where_it_is_asked_for(helm):
    scaler = only(
        helm.manifests(values={"autoscaling": {"enabled": True}}), "HorizontalPodAutoscaler"
    )["spec"]
    assert [each["type"] for each in scaler["metrics"]] == ["Resource"]


ADMITTED = {
    "CKV_K8S_21": "a release names its namespace, its manifests need not",
    "CKV_K8S_43": "digests are values; a version's default is a tag",
    "CKV_K8S_15": "tags are versions, and pullPolicy is a value",
    "CKV_K8S_35": "keys may come as environment variables: Envoy reads them from there",
    "CKV2_K8S_6": "a NetworkPolicy is a value, and those of tests are the namespace's own",
}
ADMITTED_OF_TESTS = {
    "CKV_K8S_8": "a pod that ends is not probed",
    "CKV_K8S_9": "a pod that ends is not probed",
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["minimal", "full"])
def test_passes_checkov(helm4, tmp_path, name):
    binary = tool("checkov")
    (tmp_path / "chart.yaml").write_text(helm4.template(values=VALUES[name]), encoding="utf-8")
    options = ["--framework", "kubernetes", "--skip-download", "--quiet", "-o", "json"]
    done = subprocess.run(
        [binary, "-f", "chart.yaml", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"LOG_LEVEL": "ERROR"},
    )
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 50
    assert report["summary"]["parsing_errors"] == 0
    assert [
        f"{each['check_id']} {each['check_name']}: {each['resource']}"
        for each in report["results"]["failed_checks"]
        if each["check_id"] not in ADMITTED
        and not (each["check_id"] in ADMITTED_OF_TESTS and "-test" in each["resource"])
    ] == []


def test_native_sidecar_is_valid_where_it_exists_and_refused_where_not(helm, validate):
    values = VALUES["full"] | {"nativeSidecar": True}
    text = helm.template("--kube-version", "1.29", values=values)
    validate(text, "1.29")
    pod = only(list(yaml.safe_load_all(text)), "Deployment")["spec"]["template"]["spec"]
    assert [each["name"] for each in pod["initContainers"]] == ["pointsman-render", "pointsman"]
    assert pod["initContainers"][1]["restartPolicy"] == "Always"
    assert [each["name"] for each in pod["containers"]] == ["envoy"]
    refusal = helm.refusal({"nativeSidecar": True}, "--kube-version", "1.28")
    assert "nativeSidecar needs Kubernetes 1.29" in refusal


def pods(manifests):
    for each in manifests:
        if each["kind"] == "Deployment":
            yield each["spec"]["template"]["spec"]
        elif each["kind"] == "Pod":
            yield each["spec"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_every_pod_meets_the_restricted_standard(helm, values):
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    volumes = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
    volumes |= {"projected", "secret"}
    for pod in pods(helm.manifests(values=values)):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod["automountServiceAccountToken"] is False
        for volume in pod["volumes"]:
            assert volume.keys() - {"name"} <= volumes
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            security = container["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] > 0
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
            assert all("hostPort" not in port for port in container.get("ports", []))


def test_another_charts_pod_carries_both_containers(helm, validate, tmp_path):
    """examples/vllm, with the chart as its dependency."""
    shutil.copytree(CHART, tmp_path / "pointsman")
    example = tmp_path / "pointsman" / "examples" / "vllm"
    done = helm.run("dependency", "update", str(example))
    assert done.returncode == 0, done.stderr
    text = helm.template(chart=example)
    validate(text, "1.37")
    check(text)
    manifests = [each for each in yaml.safe_load_all(text) if each]
    assert {each["kind"] for each in manifests} == {"ConfigMap", "Deployment", "Service"}
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    assert [each["name"] for each in pod["initContainers"]] == ["pointsman-render"]
    assert [each["name"] for each in pod["containers"]] == ["vllm", "pointsman", "envoy"]
    config = only(manifests, "ConfigMap")["data"]["pointsman.toml"]
    parse(config, file="pointsman.toml", environ={"ELSEWHERE_API_KEY": "k"})
    native = ["--set", "pointsman.nativeSidecar=true", "--kube-version", "1.29"]
    pod = only(helm.manifests(*native, chart=example), "Deployment")["spec"]["template"]["spec"]
    # Both serve before vLLM is started, and until it has ended.
    assert [each["name"] for each in pod["containers"]] == ["vllm"]
    natives = [each for each in pod["initContainers"] if each.get("restartPolicy") == "Always"]
    assert [each["name"] for each in natives] == ["pointsman", "envoy"]
    assert all("startupProbe" in each for each in natives)
    assert "lifecycle" not in natives[0]


def config_of(manifests):
    return tomllib.loads(only(manifests, "ConfigMap")["data"]["pointsman.toml"])


def test_full_config_reaches_the_loader_as_it_stands(helm):
    config_map, _dashboard = (
        each for each in helm.manifests(values=VALUES["full"]) if each["kind"] == "ConfigMap"
    )
    text = config_map["data"]["pointsman.toml"]
    assert tomllib.loads(text) == VALUES["full"]["config"]
    parse(text, file="pointsman.toml", environ={"PRIMARY_API_KEY": "p", "FALLBACK_API_KEY": "f"})


def test_demo_is_what_pointsman_up_demo_serves(helm):
    text = only(helm.manifests(), "ConfigMap")["data"]["pointsman.toml"]
    config = parse(text, file="pointsman.toml", environ={})
    assert [route.name for route in config.routes] == ["code", "math", "chat"]
    assert str(config.server.listen) == "0.0.0.0:8080"
    assert str(config.health) == "0.0.0.0:9465"
    assert config.admin.host == config.metrics.host == "127.0.0.1"


def test_words_that_yaml_takes_for_something_else_stay_words(helm, validate):
    values = {
        "envoy": {"logLevel": "off", "image": {"repository": "12", "tag": "30"}},
        "apiKeys": {"NO": {"secret": "null", "key": "1"}},
    }
    text = helm.template(values=values)
    validate(text, "1.37")
    pod = only(check(text), "Deployment")["spec"]["template"]["spec"]
    (envoy,) = (each for each in pod["containers"] if each["name"] == "envoy")
    assert "off" in envoy["args"]
    assert envoy["image"] == "12:30"
    assert envoy["env"][0]["name"] == "NO"


def test_keys_are_referenced_and_in_no_config_map(helm):
    manifests = helm.manifests(values=VALUES["full"])
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        names = {each["name"]: each for each in container["env"]}
        source = names["PRIMARY_API_KEY"]["valueFrom"]["secretKeyRef"]
        assert source == {"name": "llm-keys", "key": "primary"}


SECURED = {
    "config": {
        "upstream": {"x": UPSTREAM | {"api_key_file": "/etc/pointsman-keys/X"}},
        "server": {"tls": {"min_version": "TLSv1_3"}},
    },
    "tls": {"secret": "cert"},
    "auth": {"secret": "clients"},
    "apiKeyFiles": {"X": {"secret": "llm", "key": "x"}},
}


def containers_of(manifests):
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    return {each["name"]: each for each in (*pod["initContainers"], *pod["containers"])}


def test_secrets_are_mounted_where_they_are_read_and_nowhere_else(helm):
    manifests = helm.manifests(values=SECURED)
    mounted = {
        name: {each["mountPath"] for each in container.get("volumeMounts", [])}
        - {"/etc/pointsman", "/run/pointsman"}
        for name, container in containers_of(manifests).items()
    }
    tls, auth, keys = "/etc/pointsman-tls", "/etc/pointsman-auth", "/etc/pointsman-keys"
    assert mounted == {
        "pointsman-render": {tls, auth, keys},
        "pointsman": {auth, keys},
        "envoy": {tls},
    }
    text = only(manifests, "ConfigMap")["data"]["pointsman.toml"]
    config = parse(text, file="pointsman.toml", environ={})
    assert config.server.tls.cert_file == f"{tls}/tls.crt"
    assert config.server.tls.client_ca_file is None
    assert config.server.tls.min_version == "TLSv1_3"
    assert config.server.auth.keys_file == f"{auth}/keys"
    # A whole volume is followed when its Secret changes; a subPath would not be.
    for container in containers_of(manifests).values():
        assert all("subPath" not in each for each in container.get("volumeMounts", []))


@pytest.mark.parametrize(
    ("values", "probe"),
    [
        ({}, {"httpGet": {"path": "/v1/models", "port": "http", "scheme": "HTTP"}}),
        (
            {"tls": {"secret": "c"}},
            {"httpGet": {"path": "/v1/models", "port": "http", "scheme": "HTTPS"}},
        ),
        ({"tls": {"secret": "c", "clientCa": True}}, {"tcpSocket": {"port": "http"}}),
        ({"auth": {"secret": "k"}}, {"tcpSocket": {"port": "http"}}),
    ],
)
def test_a_kubelet_without_key_and_certificate_can_probe(helm, values, probe):
    found = containers_of(helm.manifests(values=values))["envoy"]["readinessProbe"]
    assert found.items() >= probe.items()


def test_helm_test_speaks_as_clients_do(helm):
    def arguments(**values):
        (pod,) = (
            each
            for each in helm.manifests(values=values)
            if each["kind"] == "Pod" and each["metadata"]["name"] == "gw-pointsman-test"
        )
        return pod["spec"]["containers"][0]["args"]

    assert arguments() == ["http://gw-pointsman:80", "auto"]
    values = SECURED | {"tls": {"secret": "c", "clientCa": True, "testSecret": "t"}}
    assert arguments(**values) == [
        "https://gw-pointsman:80",
        "auto",
        "--keys-file=/auth/keys",
        "--certificate=/client",
    ]
    service = only(helm.manifests(values=values), "Service")
    assert service["spec"]["ports"][0]["appProtocol"] == "https"


def test_a_changed_config_rolls_the_pods_and_another_value_does_not(helm):
    def annotations(**more):
        values = {"config": {"upstream": {"x": UPSTREAM}}} | more
        template = only(helm.manifests(values=values), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]

    other = {"config": {"upstream": {"x": UPSTREAM | {"model": "n"}}}}
    assert annotations() != annotations(**other)
    assert annotations() == annotations(replicas=7, service={"port": 81})


@pytest.mark.parametrize("values", [VALUES["default"], VALUES["extproc-istio"]])
def test_a_container_that_starts_again_reads_what_its_pod_began_with(helm, values):
    """The ConfigMap is mounted, and has changed: for pods to come, by an upgrade that may have failed."""
    pod = only(helm.manifests(values=values), "Deployment")["spec"]["template"]["spec"]
    (script,) = pod["initContainers"][0]["args"]
    commands = [line for line in script.splitlines() if not line.startswith("#")]
    mounted, kept = "/etc/pointsman/pointsman.toml", "/run/pointsman/pointsman.toml"
    assert commands[:2] == [f"pointsman check {mounted}", f"cp {mounted} {kept}"]
    assert commands[2:] in ([], [f"pointsman render {kept} --write"])
    (sidecar,) = [each for each in pod["containers"] if each["name"] == "pointsman"]
    assert sidecar["args"] == ["serve", "--config", kept]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"config": {"server": {}}}, "anyOf"),
        ({"config": {"upstream": {"x": UPSTREAM, "y": UPSTREAM}}}, "anyOf"),
        ({"config": {"upstream": {"x": UPSTREAM | {"modle": "m"}}}}, "modle"),
        ({"config": {"upstream": {"x": {"model": "m"}}}}, "base_url"),
        ({"config": {"upstream": {"x": UPSTREAM}, "retry": {"max": 5}}}, "max"),
        ({"config": {"upstream": {"rule": UPSTREAM}}}, "rule"),
        ({"config": {"upstream": {"x": UPSTREAM}, "extproc": {"socket": "/x"}}}, "extproc"),
        ({"replicsa": 3}, "replicsa"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
        ({"envoy": {"image": {"tag": ""}}}, "envoy"),
        ({"config": {"upstream": {"x": UPSTREAM}, "server": {"listen": ":65536"}}}, "listen"),
        ({"ingress": {"hosts": ["10.0.0.1"]}}, "hosts"),
        ({"sidecar": {"resources": {"limits": {"cpus": 1}}}}, "cpus"),
        ({"fullnameOverride": "1st"}, "fullnameOverride"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_schema_refuses(helm, values, said):
    assert said in helm.refusal(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"config": {"upstream": {"x": UPSTREAM | {"api_key_env": "KEY"}}}},
            "config.upstream.x.api_key_env is KEY, which is not among apiKeys",
        ),
        (
            {
                "config": {
                    "upstream": {"x": UPSTREAM},
                    "router": {
                        "encoder": {"url": "http://tei:80/v1/embeddings", "api_key_env": "E"}
                    },
                }
            },
            "config.router.encoder.api_key_env is E, which is not among apiKeys",
        ),
        (
            {"config": {"upstream": {"x": UPSTREAM | {"api_key_file": "/etc/pointsman-keys/K"}}}},
            "config.upstream.x.api_key_file is /etc/pointsman-keys/K, which is not among apiKeyFiles",
        ),
        ({"tls": {"clientCa": True}}, "tls.clientCa and tls.testSecret need tls.secret"),
        (
            {"config": {"upstream": {"x": UPSTREAM}, "server": {"listen": "127.0.0.1:8080"}}},
            "which no Service reaches",
        ),
        (
            {"config": {"upstream": {"x": UPSTREAM}, "health": {"listen": "localhost:1"}}},
            "where no kubelet can ask",
        ),
        (
            {
                "config": {"upstream": {"x": UPSTREAM}, "metrics": {"listen": "127.0.0.1:1"}},
                "podMonitor": {"enabled": True},
            },
            "which Prometheus cannot reach",
        ),
        (
            {"envoy": {"resources": {"requests": {"memory": "1025Mi"}}}},
            "envoy.resources.requests.memory is 1025Mi, more than its limit of 1Gi",
        ),
        (
            {"sidecar": {"resources": {"limits": {"nvidia.com/gpu": "0.5"}}}},
            "sidecar.resources.limits.nvidia.com/gpu is 0.5: of a device there are whole ones only",
        ),
    ],
)
def test_what_the_schema_cannot_say_is_refused_with_its_mend(helm, values, said):
    assert said in helm.refusal(values)


@pytest.mark.parametrize(
    ("release", "name"),
    [("gw", "gw-pointsman"), ("pointsman", "pointsman"), ("a.b", "a-b-pointsman")],
)
def test_any_release_name_gives_names_that_kubernetes_takes(helm, release, name):
    manifests = check(helm.run("template", release, str(CHART)).stdout)
    assert only(manifests, "Service")["metadata"]["name"] == name


def test_a_name_that_no_service_may_have_is_refused(helm):
    done = helm.run("template", "1st", str(CHART))
    assert "begins with a digit, which a Service's may not: set fullnameOverride" in done.stderr
    assert helm.run("template", "1st", str(CHART), values={"fullnameOverride": "first"}).stdout


def test_own_annotations_of_pods_stand_beside_the_checksums(helm):
    values = {"podAnnotations": {"checksum/config": "mine", "a": "b"}}
    deployment = only(helm.manifests(values=values), "Deployment")
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert len(annotations["checksum/config"]) == 64
    assert annotations["a"] == "b"
    reloader = {"reloader.stakater.com/auto": "true"}
    deployment = only(helm.manifests(values={"deploymentAnnotations": reloader}), "Deployment")
    assert deployment["metadata"]["annotations"] == reloader


def test_helm_test_drills_unless_told_not_to(helm):
    def names(**values):
        return {each["metadata"]["name"] for each in helm.manifests(values=values)}

    assert "gw-pointsman-test-drill" in names()
    assert "gw-pointsman-test-drill" not in names(test={"drill": []})
    faults = SCHEMA["properties"]["test"]["properties"]["drill"]["items"]["enum"]
    assert faults == list(DrillFault)


def test_notes_say_what_to_do_next(helm4):
    """Only an installation shows them; a dry run is one, and Helm 3 asks a cluster even for that."""
    notes = {
        name: helm4.run("install", "gw", str(CHART), "--dry-run=client", values=values).stdout
        for name, values in VALUES.items()
        if values.get("mode") != "extproc"
    }
    for each in notes.values():
        assert "helm -n default test gw" in each
        assert "kubectl -n default port-forward" in each
    assert "This is the DEMO" in notes["default"]
    assert "This is the DEMO" not in notes["minimal"]
    assert "podMonitor.enabled" in notes["minimal"]


def test_generated_files_are_current():
    done = subprocess.run(
        [sys.executable, CHART / "generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_scripts_pass_shellcheck():
    subprocess.run([tool("shellcheck"), CHART / "files" / "drain.sh"], check=True)


def test_dockerfile_passes_hadolint():
    subprocess.run([tool("hadolint"), CHART.parents[1] / "Dockerfile"], check=True)


# --- what the schema admits ------------------------------------------------------------------------

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
PASSED_THROUGH = {
    "affinity": {"nodeAffinity": {}},
    "podSecurityContext": {"fsGroup": 65532},
    "global": {"any": "thing"},
    "extraEnv": {"name": "TZ", "value": "UTC"},
    "extraVolumes": {"name": "extra", "emptyDir": {}},
    "extraVolumeMounts": {"name": "extra", "mountPath": "/extra"},
    "parentRefs": {"name": "gateway", "namespace": "gateways"},
    "from": {"podSelector": {"matchLabels": {"app": "client"}}},
    "metricsFrom": {"namespaceSelector": {}},
    "egress": {"ports": [{"port": 443, "protocol": "TCP"}]},
    "tolerations": {"key": "dedicated", "operator": "Exists"},
}
"""Kubernetes' own objects, which the schema leaves to Kubernetes: a good one of each."""


def resolved(schema):
    while "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def matching(pattern):
    """In Python `$` also stands before a final newline."""
    return st.from_regex(pattern.removesuffix("$") + r"\Z")


def admitted(schema):
    """Values that a schema of the kinds used here admits; objects without a schema stay empty."""
    schema = resolved(schema)
    if "allOf" in schema:
        return admitted(schema["allOf"][0]).filter(lambda image: image.get("tag") != "")
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "number":
            return st.floats(schema["minimum"], schema["maximum"], allow_subnormal=False)
        case "string" | ["string", *_]:
            if "pattern" not in schema:
                return st.text(
                    st.characters(exclude_categories=["Cs", "Cc", "Cn"])
                )  # YAML has no others
            text = matching(schema["pattern"])
            if refused := schema.get("not", {}).get("pattern"):
                text = text.filter(lambda value: not re.search(refused, value))
            return text.filter(lambda value: len(value) <= schema.get("maxLength", 999))
        case "array":
            items = resolved(schema["items"])
            low = schema.get("minItems", 0)
            return st.lists(admitted(items), min_size=low, max_size=3, unique_by=repr)
        case "object":
            return _objects(schema)


def passed_through(key, schema):
    one = PASSED_THROUGH[key]
    return st.sampled_from([one, {}] if resolved(schema)["type"] == "object" else [[one], []])


def _objects(schema):
    if "properties" not in schema:
        if "propertyNames" not in schema:
            return st.just({})
        keys = resolved(schema["propertyNames"])
        names = matching(keys["pattern"]).filter(lambda key: len(key) <= keys.get("maxLength", 999))
        return st.dictionaries(names, admitted(schema["additionalProperties"]), max_size=3)
    properties = {
        key: passed_through(key, each) if key in PASSED_THROUGH else admitted(each)
        for key, each in schema["properties"].items()
        if key != "config"
    }
    required = {key: properties.pop(key) for key in schema.get("required", [])}
    return st.fixed_dictionaries(required, optional=properties)


def config_values():
    """Upstreams, routes over them, and any other table."""
    tables = SCHEMA["properties"]["config"]["properties"]
    upstream = tables["upstream"]["additionalProperties"]
    route = tables["route"]["items"]
    names = st.from_regex(r"\A[a-z][A-Za-z0-9._-]{0,9}\Z").filter(lambda name: name != "rule")
    upstreams = st.dictionaries(names, admitted(upstream), min_size=1, max_size=3)
    others = st.fixed_dictionaries(
        {},
        optional={key: admitted(tables[key]) for key in tables if key not in ("upstream", "route")},
    )
    routes = st.lists(admitted(route), min_size=1, max_size=3)
    return st.builds(lambda u, r, o: o | {"upstream": u, "route": r}, upstreams, routes, others)


# Helm runs for each example: few of them, the same each time, and none to find a smaller one.
SLOW = settings(
    max_examples=int(os.environ.get("CHART_EXAMPLES", "60")),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OURS = (
    "not among apiKeys",
    "need tls.secret",
    "no Service reaches",
    "no kubelet",
    "Prometheus cannot",
    "more than its limit",
    "whole ones only",
    "begins with a digit",
    "needs Kubernetes",
    "mode extproc",
    "extproc.",
    "a ServiceEntry needs a name",
)


@pytest.mark.timeout(300)
@SLOW
@given(config=config_values())
def test_any_config_that_the_schema_admits_reaches_the_loader_unchanged(helm4, config):
    names = {each["api_key_env"] for each in config["upstream"].values() if "api_key_env" in each}
    keys = {name: {"secret": "s", "key": "k"} for name in names}
    done = helm4.run("template", "gw", str(CHART), values={"config": config, "apiKeys": keys})
    if done.returncode:
        assert any(each in done.stderr for each in OURS), done.stderr
        return
    needed = {"server": {"listen": "0.0.0.0:8080"}, "health": {"listen": "0.0.0.0:9465"}}
    expected = config | {key: needed[key] | config.get(key, {}) for key in needed}
    assert config_of(list(yaml.safe_load_all(done.stdout))) == expected


@pytest.mark.timeout(300)
@SLOW
@given(
    values=_objects(SCHEMA),
    config=st.one_of(st.just({}), config_values()),
    release=st.from_regex(r"\A[a-z]([-a-z0-9]{0,20}[a-z0-9])?(\.[a-z0-9]{1,9})?\Z"),
    version=st.sampled_from(["1.27", "1.29", "1.37"]),
)
def test_any_values_that_the_schema_admits_are_valid_for_kubernetes(
    helm4, validate, values, config, release, version
):
    mounts = [values.get(part, {}).get("extraVolumeMounts") for part in ("sidecar", "envoy")]
    if any(mounts):
        values["extraVolumes"] = [PASSED_THROUGH["extraVolumes"]]
    if values.get("httpRoute", {}).get("enabled"):
        values["httpRoute"]["parentRefs"] = [PASSED_THROUGH["parentRefs"]]
    for upstream in config.get("upstream", {}).values():
        if name := upstream.get("api_key_env"):
            values.setdefault("apiKeys", {}).setdefault(name, {"secret": "s", "key": "k"})
    if values.get("mode") == "extproc":  # most of it would only be refused
        for name in ("tls", "auth", "apiKeyFiles"):
            values.pop(name, None)
    values["config"] = config
    options = ("--kube-version", version)
    done = helm4.run("template", release, str(CHART), *options, values=values)
    if done.returncode:
        assert any(each in done.stderr for each in OURS), done.stderr
        return
    validate(done.stdout, version)
    check(done.stdout)
