"""What an API server refuses beyond its schemas: names, labels, and parts that must fit together.

Written from the API's documentation and for the kinds that the chart renders; no server is asked.
"""

import re
from decimal import Decimal

import yaml

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti|)")
FACTORS = {"m": Decimal("0.001"), "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
FACTORS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, as Kubernetes' own parser does."""


def _mapping(loader, node):
    keys = [loader.construct_object(key) for key, _ in node.value]
    assert len(set(keys)) == len(keys), f"twice: {keys}"
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def check(text):
    """The manifests of `helm template`; AssertionError names what would be refused."""
    manifests = [each for each in yaml.load_all(text, _Loader) if each]
    keys = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(keys)) == len(keys), keys
    for each in manifests:
        _metadata(each)
    tests = [each for each in manifests if each["kind"] == "Pod"]
    pods = [each["spec"] for each in tests]
    for deployment in _of(manifests, "Deployment"):
        _deployment(deployment, manifests, tests)
        pods.append(deployment["spec"]["template"]["spec"])
    for pod in pods:
        _pod(pod)
    for ingress in _of(manifests, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            _host(rule.get("host", "any.example"))
            for path in rule["http"]["paths"]:
                name = path["backend"]["service"]["name"]
                assert name in [each["metadata"]["name"] for each in _of(manifests, "Service")]
    return manifests


def _of(manifests, kind):
    return [each for each in manifests if each["kind"] == kind]


def _host(host):
    assert len(host) <= 253
    assert SUBDOMAIN.fullmatch(host.removeprefix("*.")), host
    assert not re.fullmatch(r"[0-9.]+", host), host


def _metadata(manifest):
    metadata, name = manifest["metadata"], manifest["metadata"]["name"]
    assert len(name) <= 253
    assert SUBDOMAIN.fullmatch(name), name
    if manifest["kind"] == "Service":
        assert len(name) <= 63
        assert SERVICE.fullmatch(name), name
    _labels(metadata.get("labels", {}))
    _annotations(metadata.get("annotations", {}))


def _key(key):
    prefix, slash, name = key.rpartition("/")
    assert QUALIFIED.fullmatch(name), key
    assert not slash or (len(prefix) <= 253 and SUBDOMAIN.fullmatch(prefix)), key


def _labels(labels):
    for key, value in labels.items():
        _key(key)
        assert isinstance(value, str), (key, value)
        assert LABEL_VALUE.fullmatch(value), (key, value)


def _annotations(annotations):
    for key, value in annotations.items():
        _key(key.lower())
        assert isinstance(value, str), (key, value)
    assert sum(len(k) + len(v) for k, v in annotations.items()) <= 256 * 1024


def _deployment(deployment, manifests, tests):
    """With all that selects its pods, which must not select those of the tests."""
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    _labels(labels)
    _annotations(template["metadata"]["annotations"])
    ports = {
        port["name"]
        for container in _containers(template["spec"])
        for port in container.get("ports", ())
    }
    selectors = [deployment["spec"]["selector"]["matchLabels"]]
    for service in _of(manifests, "Service"):
        selectors.append(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    budgets = _of(manifests, "PodDisruptionBudget")
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in budgets]
    for policy in _of(manifests, "NetworkPolicy"):
        selectors.append(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= ports
    for monitor in _of(manifests, "PodMonitor"):
        selectors.append(monitor["spec"]["selector"]["matchLabels"])
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports
    for selector in selectors:
        assert selector.items() <= labels.items()
        for test in tests:
            assert not selector.items() <= test["metadata"]["labels"].items()
    for scaler in _of(manifests, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert 1 <= scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]


def _containers(pod):
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _pod(pod):
    containers = _containers(pod)
    assert pod["containers"]
    assert all("restartPolicy" not in each for each in pod["containers"])
    names = [each["name"] for each in containers]
    volumes = [each["name"] for each in pod["volumes"]]
    for each in (names, volumes):
        assert len(set(each)) == len(each), each
        assert all(len(name) <= 63 and LABEL.fullmatch(name) for name in each), each
    for container in containers:
        _container(container, volumes)
    assert SUBDOMAIN.fullmatch(pod.get("priorityClassName", "none"))
    keys = [
        (each["topologyKey"], each["whenUnsatisfiable"])
        for each in pod.get("topologySpreadConstraints", ())
    ]
    assert len(set(keys)) == len(keys), keys


def _container(container, volumes):
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
    assert len(ports) == len(container.get("ports", ()))
    for name, port in ports.items():
        assert len(name) <= 15
        assert 1 <= port <= 65_535
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        action = container.get(probe, {}).get("httpGet") or container.get(probe, {}).get(
            "tcpSocket"
        )
        assert action is None or action["port"] in ports
    mounts = [each["mountPath"] for each in container.get("volumeMounts", ())]
    assert len(set(mounts)) == len(mounts), mounts
    assert {each["name"] for each in container.get("volumeMounts", ())} <= set(volumes)
    for variable in container.get("env", ()):
        assert ENV_NAME.fullmatch(variable["name"]), variable
        if source := variable.get("valueFrom"):
            assert SUBDOMAIN.fullmatch(source["secretKeyRef"]["name"]), variable
    resources = container["resources"]
    limits = {name: _quantity(each) for name, each in resources.get("limits", {}).items()}
    for name, each in resources.get("requests", {}).items():
        assert _quantity(each) <= limits.get(name, _quantity(each)), (name, resources)
    for name in (*resources.get("requests", {}), *limits):
        if name not in ("cpu", "memory", "ephemeral-storage"):
            assert "/" in name
            assert limits[name] == int(limits[name])
            assert name not in resources.get("requests", {})


def _quantity(value):
    if not isinstance(value, str):
        return Decimal(value)
    number, suffix = QUANTITY.fullmatch(value).groups()
    return Decimal(number) * FACTORS[suffix]
