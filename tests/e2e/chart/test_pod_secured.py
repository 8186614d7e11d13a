"""The chart's pod with HTTPS and client keys, run by podman: what the Secrets hold is served and followed.

podman 4.3 knows no volume of a Secret, so the Secrets are played as ConfigMaps of the same name and
keys; mounted they look alike. It updates no volume either: that is shown in tests/integration.
"""

import time

import httpx
import pytest
import yaml
from certificates import Authority
from chart_tools import CHART, only
from gateway import CHAT, HOST, ask, free_ports, scenario
from pods import image_values, need_podman, podman

POD = "secured-pointsman"
KEY = "sk-team-a-0123456789"


def config_map(name, data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def port(helm4, authority):
    need_podman()
    values = image_values() | {
        "tls": {"secret": "cert"},
        "auth": {"secret": "clients", "key": "keys.txt"},
    }
    manifests = helm4.manifests(values=values)
    template = only(manifests, "Deployment")["spec"]["template"]
    spec = template["spec"] | {"restartPolicy": "OnFailure"}
    for volume in spec["volumes"]:
        if secret := volume.pop("secret", None):
            volume["configMap"] = {"name": secret.pop("secretName"), **secret}
    (port,) = free_ports(1)
    for container in spec["containers"]:
        container["ports"] = [
            each | {"hostIP": HOST, "hostPort": port}
            for each in container.get("ports", [])
            if each["name"] == "http"
        ]
    leaf = authority.issue()
    pem = {
        "tls.crt": "".join(each.bytes().decode() for each in leaf.cert_chain_pems),
        "tls.key": leaf.private_key_pem.bytes().decode(),
    }
    metadata = {"name": POD, "labels": template["metadata"]["labels"]}
    played = [
        only(manifests, "ConfigMap"),
        config_map("cert", pem),
        config_map("clients", {"keys.txt": f"team-a {KEY}\n"}),
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
    ]
    podman("pod", "rm", "--force", "--ignore", POD)
    try:
        podman("kube", "play", "-", stdin=yaml.safe_dump_all(played))
        deadline = time.monotonic() + 60
        while not decides(port, authority):
            assert time.monotonic() < deadline, podman("pod", "logs", POD, check=False)
            time.sleep(0.2)
        yield port
    finally:
        podman("pod", "rm", "--force", "--ignore", POD)


def decides(port, authority):
    """The whole path is there: Envoy, and a sidecar with a warm model."""
    try:
        answer = httpx.post(
            f"https://{HOST}:{port}{CHAT}",
            json=ask(),
            headers={"authorization": f"Bearer {KEY}"},
            verify=authority.trusted(),
        )
    except httpx.TransportError:
        return False
    return answer.headers["x-pointsman-reason"] != "degraded_bypassed"


@scenario
async def test_serves_https_and_asks_for_a_key(port, authority):
    async with httpx.AsyncClient(
        base_url=f"https://{HOST}:{port}", verify=authority.trusted(), http2=True, timeout=30
    ) as client:
        answer = await client.post(CHAT, json=ask())
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        answer = await client.post(CHAT, json=ask(), headers={"authorization": f"Bearer {KEY}"})
        assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
        assert "x-pointsman-upstream" in answer.headers


def test_keys_are_in_a_file_of_their_owner_and_in_nothing_that_is_printed(port):
    listing = podman("exec", f"{POD}-envoy", "/bin/sh", "-c", "ls -ln /run/pointsman")
    files = {line.split()[-1]: line.split()[:4] for line in listing.splitlines() if "json" in line}
    assert files.keys() == {"client-keys.json", "tls-server.json"}
    assert all(each == ["-rw-------", "1", "65532", "65532"] for each in files.values()), listing
    printed = podman("exec", f"{POD}-envoy", "/bin/sh", "-c", "cat /run/pointsman/envoy.yaml")
    assert KEY not in printed
    assert KEY not in podman("pod", "logs", POD, check=False)


def test_helm_test_is_let_in(port):
    """Its script, inside the pod, with the file that the chart mounts for it."""
    script = (CHART / "files" / "test.py").read_text(encoding="utf-8")
    done = podman(
        *("exec", "-i", f"{POD}-pointsman", "python3", "-", "https://127.0.0.1:8080", "auto"),
        *("--keys-file", "/etc/pointsman-auth/keys"),
        stdin=script,
    )
    assert "x-pointsman-upstream: " in done
