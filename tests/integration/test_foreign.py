"""An Envoy that is not ours, as envoy/examples/external.yaml has it, and sidecars on TCP beside it."""

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest
import yaml
from gateway import CHAT, HOST, START_S, ask, free_ports, scenario, until
from prometheus_client.parser import text_string_to_metric_families

from extproc.demo.faults import parse_fault
from extproc.demo.upstream import ScriptedUpstream
from extproc.supervise import find_envoy

pytestmark = pytest.mark.envoy

EXAMPLE = Path(__file__).parents[2] / "envoy" / "examples" / "external.yaml"
CODE = "what does this traceback say"
CONFIG = """
[circuit_breaker]
failure_threshold = 3
cooldown = "1s"

[router]
default = "chat"
deadline = "5s"

[[route]]
name = "chat"
upstreams = ["general", "coder"]

[[route]]
name = "code"
upstreams = ["coder", "general"]
keywords = ["traceback"]
"""


def manager_of(listener):
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


class Sidecar:
    def __init__(self, directory, number, upstreams, *, settle, tls):
        self.port, self.metrics_port = free_ports(2)
        self.log = directory / f"sidecar-{number}.log"
        self._path = directory / f"sidecar-{number}.toml"
        parts = [
            f'[extproc]\nlisten = "{HOST}:{self.port}"\nsettle = "{settle}"\n{tls}',
            f'[metrics]\nlisten = "{HOST}:{self.metrics_port}"\n',
        ]
        for name, upstream in upstreams.items():
            parts.append(
                f'[upstream.{name}]\nname = "vllm-{name}"\n'
                f'model = "model-of-{name}"\nbase_url = "{upstream.base_url}"\n'
            )
        self._path.write_text("\n".join(parts) + CONFIG)
        self.process = None

    async def start(self, launch=("-m", "extproc.cli")):
        command = [sys.executable, *launch, "serve", "--config", str(self._path)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        async with httpx.AsyncClient() as client:

            async def ready():
                assert self.process.poll() is None, self.log.read_text()
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get(f"http://{HOST}:{self.metrics_port}/readyz")
                    return answer.status_code == 200

            await until(ready, within_s=START_S)

    async def metric(self, name, **labels):
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{HOST}:{self.metrics_port}/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def settled(self, name, value, **labels):
        async def there():
            return await self.metric(name, **labels) == value

        await until(there)


class Mesh:
    """One Envoy, `sidecars`, and the upstreams coder and general."""

    def __init__(self, directory, upstreams, sidecars):
        self.directory = directory
        self.upstreams = upstreams
        self.sidecars = sidecars
        self.listen, self.admin = free_ports(2)
        self.client = httpx.AsyncClient(base_url=f"http://{HOST}:{self.listen}", timeout=30)
        self.envoy = None

    async def start_envoy(self, *, fail_open, tls, edit, within_s):
        bootstrap = yaml.safe_load(EXAMPLE.read_text())
        bootstrap["admin"]["address"]["socket_address"]["port_value"] = self.admin
        (listener,) = bootstrap["static_resources"]["listeners"]
        listener["address"]["socket_address"]["port_value"] = self.listen
        manager = manager_of(listener)
        ext_proc = manager["http_filters"][0]["typed_config"]
        ext_proc |= {"failure_mode_allow": fail_open, "message_timeout": "5.6s"}
        for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
            route["route"]["retry_policy"]["per_try_timeout"] = "0.8s"
            for header in route["match"].get("headers", []):
                header["string_match"]["exact"] = "vllm-" + header["string_match"]["exact"]
        ports = {name: [each.port] for name, each in self.upstreams.items()}
        ports["pointsman"] = [each.port for each in self.sidecars]
        for cluster in bootstrap["static_resources"]["clusters"]:
            (endpoints,) = cluster["load_assignment"]["endpoints"]
            endpoints["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": HOST, "port_value": port}}}}
                for port in ports[cluster["name"]]
            ]
            if cluster["name"] == "pointsman" and tls:
                cluster["transport_socket"] = tls
        edit(listener)
        path = self.directory / "envoy.yaml"
        path.write_text(yaml.safe_dump(bootstrap))
        command = [str(find_envoy()), "-c", str(path), "--log-level", "warning"]
        with (self.directory / "envoy.log").open("ab") as log:
            self.envoy = subprocess.Popen([*command, "--use-dynamic-base-id"], stderr=log)

        async def ready():
            assert self.envoy.poll() is None, (self.directory / "envoy.log").read_text()
            with contextlib.suppress(httpx.HTTPError):
                stats = await self.client.get(
                    f"http://{HOST}:{self.admin}/stats?filter=cluster.pointsman.membership_healthy"
                )
                return stats.text.endswith(f" {len(self.sidecars)}\n")

        await until(ready, within_s=within_s)

    async def chat(self, body=None, **kwargs):
        return await self.client.post(CHAT, json=ask() if body is None else body, **kwargs)

    async def fault(self, upstream, kind, **more):
        await self.upstreams[upstream].set_fault(
            parse_fault({"kind": kind, **more}) if kind else None
        )

    async def aclose(self):
        await self.client.aclose()
        processes = [self.envoy, *(each.process for each in self.sidecars)]
        for process in filter(None, processes):
            process.kill()
            process.wait()
        for upstream in self.upstreams.values():
            await upstream.aclose()


@contextlib.asynccontextmanager
async def mesh(
    *,
    sidecars=1,
    fail_open=False,
    settle="3s",
    sidecar_tls="",
    envoy_tls=None,
    edit=lambda listener: None,
    launch=("-m", "extproc.cli"),
    within_s=START_S,
):
    directory = Path(tempfile.mkdtemp(prefix="mesh-"))
    upstreams = {name: ScriptedUpstream(name, chunk_gap_s=0.0) for name in ("coder", "general")}
    for upstream in upstreams.values():
        await upstream.start()
    beside = [
        Sidecar(directory, each, upstreams, settle=settle, tls=sidecar_tls)
        for each in range(sidecars)
    ]
    running = Mesh(directory, upstreams, beside)
    try:
        for each in beside:
            await each.start(launch)
        await running.start_envoy(fail_open=fail_open, tls=envoy_tls, edit=edit, within_s=within_s)
        yield running
    except BaseException:
        for log in sorted(directory.glob("*.log")):
            sys.stderr.write(f"--- {log.name}\n{log.read_text()[-4000:]}\n")
        raise
    finally:
        await running.aclose()
        shutil.rmtree(directory, ignore_errors=True)


@scenario
async def test_auto_explicit_and_unknown_models_take_the_right_upstream_with_its_model():
    async with mesh() as running:
        (sidecar,) = running.sidecars
        default = await running.chat(ask("hello"))
        assert default.status_code == 200
        assert default.headers["x-pointsman-upstream"] == "vllm-general"
        assert default.headers["x-pointsman-reason"] == "default"
        keyword = await running.chat(ask(CODE))
        assert keyword.headers["x-pointsman-route"] == "code"
        assert keyword.headers["x-pointsman-reason"] == "keyword"
        assert keyword.headers["x-pointsman-upstream"] == "vllm-coder"
        assert keyword.headers["x-pointsman-model"] == "model-of-coder"
        assert keyword.headers["x-pointsman-attempts"] == "vllm-coder:200"
        assert "x-pointsman-fallback" not in keyword.headers
        assert keyword.json()["model"] == "model-of-coder"
        assert [each.model for each in running.upstreams["coder"].seen] == ["model-of-coder"]
        explicit = await running.chat(ask(model="coder"))
        assert explicit.headers["x-pointsman-reason"] == "explicit"
        assert explicit.json()["model"] == "model-of-coder"
        streamed = await running.chat(ask(CODE, stream=True))
        assert streamed.headers["x-pointsman-upstream"] == "vllm-coder"
        assert streamed.text.endswith("data: [DONE]\n\n")
        unknown = await running.chat(ask(model="gpt-9"))
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        listed = await running.client.get("/v1/models")
        assert "auto" in {each["id"] for each in listed.json()["data"]}
        explained = await running.client.post("/route", json={"prompt": CODE})
        assert explained.json()["route"] == "code"
        await sidecar.settled("pointsman_requests_total", 6, outcome="served")
        await sidecar.settled("pointsman_requests_total", 1, outcome="rejected")
        await sidecar.settled("pointsman_decisions_total", 2, route="code", reason="keyword")
        await sidecar.settled("pointsman_time_to_headers_seconds_count", 4)


def with_a_buffer(listener):
    """As Envoy Gateway's requestBuffer does it, over its 32 KiB."""
    listener["per_connection_buffer_limit_bytes"] = 32768
    manager = manager_of(listener)
    prefix = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3."
    buffer = {"@type": prefix + "Buffer", "max_request_bytes": 32768}
    manager["http_filters"].insert(0, {"name": "buffer", "typed_config": buffer, "disabled": True})
    per_route = {"@type": prefix + "BufferPerRoute", "buffer": {"max_request_bytes": 4_000_000}}
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route["typed_per_filter_config"] = {"buffer": per_route}


@pytest.mark.parametrize("edit", [lambda listener: None, with_a_buffer])
@scenario
async def test_a_body_of_megabytes_is_routed_and_gzip_is_told_apart(edit):
    async with mesh(edit=edit) as running:
        large = await running.chat(ask("x " * 1_500_000 + "\n\n" + CODE))
        assert large.status_code == 200
        assert large.headers["x-pointsman-route"] == "code"
        raw = await running.client.post(
            CHAT,
            content=b"\x1f\x8b",
            headers={"content-encoding": "gzip", "content-type": "application/json"},
        )
        assert raw.status_code == 415
        assert raw.json()["error"]["code"] == "unsupported_content_encoding"


def without_stripping(listener):
    del manager_of(listener)["early_header_mutation_extensions"]


@scenario
async def test_headers_in_our_name_steer_nothing_and_reach_nobody():
    async with mesh(edit=without_stripping) as running:
        spoofed = {
            "x-pointsman-upstream": "vllm-general",
            "x-pointsman-model": "free-lunch",
            "x-pointsman-skip": ",coder,",
            "x-pointsman-anything": "y",
        }
        response = await running.chat(ask(CODE), headers=spoofed)
        assert response.headers["x-pointsman-upstream"] == "vllm-coder"
        (seen,) = running.upstreams["coder"].seen
        ours = {key: value for key, value in seen.headers.items() if key.startswith("x-pointsman-")}
        assert ours == {"x-pointsman-model": "model-of-coder"}


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [("5xx", 503, "5xx"), ("hang", 504, "timeout"), ("refused", 503, "connect_error")],
)
@scenario
async def test_failures_open_the_circuit_and_the_next_upstream_gets_the_requests(
    fault, status, reason
):
    async with mesh() as running:
        (sidecar,) = running.sidecars
        await running.fault("coder", fault)
        for _ in range(3):
            failed = await running.chat(ask(CODE))
            assert failed.status_code == status
            assert failed.headers["x-pointsman-attempts"] == f"vllm-coder:{reason}"
            assert failed.headers["x-pointsman-fallback"] == reason
        await sidecar.settled("pointsman_circuit_state", 2, upstream="vllm-coder")
        passed = await running.chat(ask(CODE))
        assert passed.status_code == 200
        assert passed.headers["x-pointsman-attempts"] == "vllm-coder:circuit_open,vllm-general:200"
        assert passed.headers["x-pointsman-fallback"] == "circuit_open"
        assert passed.json()["model"] == "model-of-general"
        labels = {"reason": "circuit_open", "from": "vllm-coder", "to": "vllm-general"}
        await sidecar.settled("model_fallback_total", 1, **labels)
        await sidecar.settled("pointsman_requests_total", 3, outcome="failed")
        await sidecar.settled("pointsman_requests_total", 1, outcome="served_by_fallback")
        # After the cooldown one trial closes it.
        await running.fault("coder", None)

        async def back():
            return (await running.chat(ask(CODE))).headers["x-pointsman-upstream"] == "vllm-coder"

        await until(back, every_s=0.1)
        await sidecar.settled("pointsman_circuit_state", 0, upstream="vllm-coder")


@scenario
async def test_with_every_circuit_open_the_rule_answers_in_the_shape_that_was_asked_for():
    async with mesh() as running:
        (sidecar,) = running.sidecars
        for name in ("coder", "general"):
            await running.fault(name, "5xx")
        for _ in range(6):
            await running.chat(ask(CODE))
        for name in ("coder", "general"):
            await sidecar.settled("pointsman_circuit_state", 2, upstream=f"vllm-{name}")
        answered = await running.chat(ask(CODE))
        assert answered.status_code == 200
        assert answered.headers["x-pointsman-upstream"] == "rule"
        assert answered.headers["x-pointsman-attempts"].endswith("rule:200")
        assert answered.json()["object"] == "chat.completion"
        streamed = await running.chat(ask(CODE, stream=True))
        assert streamed.headers["content-type"] == "text/event-stream"
        assert streamed.text.endswith("data: [DONE]\n\n")
        honest = await running.client.post("/v1/embeddings", json={"model": "auto", "input": "x"})
        assert honest.status_code == 503
        assert honest.json()["error"]["code"] == "no_upstream_available"
        await sidecar.settled("pointsman_requests_total", 2, outcome="served_by_rule")


@scenario
async def test_a_client_that_leaves_is_counted_as_one():
    async with mesh() as running:
        (sidecar,) = running.sidecars
        await running.fault("coder", "slow_headers", delay_s=0.7)
        left = asyncio.create_task(running.chat(ask(CODE)))
        await until(lambda: running.upstreams["coder"].seen)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await sidecar.settled("pointsman_requests_total", 1, outcome="client_gone")


@scenario
async def test_without_the_sidecar_a_closed_filter_refuses_and_an_open_one_takes_the_default_route():
    async with mesh() as running:
        running.sidecars[0].process.kill()
        running.sidecars[0].process.wait()
        refused = await running.chat(ask(CODE))
        assert refused.status_code == 500
        assert not running.upstreams["coder"].seen
        assert not running.upstreams["general"].seen
    async with mesh(fail_open=True) as running:
        await running.fault("coder", "slow_headers", delay_s=0.7)
        in_flight = asyncio.create_task(running.chat(ask(CODE)))
        await until(lambda: running.upstreams["coder"].seen)
        running.sidecars[0].process.kill()
        running.sidecars[0].process.wait()
        assert (await in_flight).json()["model"] == "model-of-coder"
        passed = await running.chat(ask(CODE), headers={"x-pointsman-upstream": "vllm-coder"})
        assert passed.status_code == 200
        (seen,) = running.upstreams["general"].seen  # the default, whatever the client says
        assert seen.model == "auto"


async def steadily(running, counts, stop):
    """Requests one after another until told to stop; their statuses, counted."""
    while not stop.is_set():
        response = await running.chat(ask(CODE))
        counts[response.status_code] = counts.get(response.status_code, 0) + 1


@scenario
async def test_a_replica_that_drains_under_load_loses_nothing():
    async with mesh(sidecars=2) as running:
        # Long enough that answers are waited for when the replica ends.
        await running.fault("coder", "slow_headers", delay_s=0.2)
        counts, stop = {}, asyncio.Event()
        clients = [asyncio.create_task(steadily(running, counts, stop)) for _ in range(8)]
        await asyncio.sleep(1)
        first, second = running.sidecars
        assert await first.metric("pointsman_requests_total") > 0
        assert await second.metric("pointsman_requests_total") > 0
        began = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        while first.process.poll() is None:
            await asyncio.sleep(0.05)
        assert first.process.returncode == 0
        assert time.monotonic() - began < 8
        await asyncio.sleep(1)
        stop.set()
        await asyncio.gather(*clients)
        assert counts.keys() == {200}
        assert sum(counts.values()) > 50


@scenario
async def test_a_drain_lets_go_of_requests_that_wait_for_their_answer():
    async with mesh(settle="0s") as running:
        (sidecar,) = running.sidecars
        await running.fault("coder", "slow_headers", delay_s=0.7)
        slow = asyncio.create_task(running.chat(ask(CODE)))
        await until(lambda: running.upstreams["coder"].seen)
        sidecar.process.send_signal(signal.SIGTERM)
        response = await slow
        assert response.status_code == 200
        assert response.json()["model"] == "model-of-coder"
        assert "x-pointsman-route" not in response.headers  # nobody was there to tell
        await until(lambda: sidecar.process.poll() is not None)
        assert sidecar.process.returncode == 0


SHORT_LIVED = """
import sys
from extproc import cli
from extproc.serving.server import ForeignServer
ForeignServer.__init__.__kwdefaults__["max_age_ms"] = 300
sys.exit(cli.main())
"""


@scenario
async def test_connections_that_reach_their_age_lose_nothing():
    async with mesh(launch=("-c", SHORT_LIVED)) as running:
        await running.fault("coder", "slow_headers", delay_s=0.05)
        counts, stop = {}, asyncio.Event()
        clients = [asyncio.create_task(steadily(running, counts, stop)) for _ in range(8)]
        await asyncio.sleep(4)
        stop.set()
        await asyncio.gather(*clients)
        stats = await running.client.get(
            f"http://{HOST}:{running.admin}/stats?filter=cluster.pointsman.upstream_cx_total"
        )
        assert int(stats.text.rpartition(":")[2]) > 8  # of at most two threads
        assert counts.keys() == {200}


def self_signed(directory: Path):
    """A CA that is its own server and client certificate."""
    request = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        "-subj /CN=pointsman -addext subjectAltName=DNS:pointsman,IP:127.0.0.1 "
        "-keyout tls.key -out tls.crt"
    )
    subprocess.run(request.split(), cwd=directory, check=True, capture_output=True)


@pytest.mark.parametrize("with_certificate", [True, False])
@scenario
async def test_tls_with_client_certificates(tmp_path, with_certificate):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing")
    self_signed(tmp_path)
    cert, key = str(tmp_path / "tls.crt"), str(tmp_path / "tls.key")
    sidecar_tls = (
        f'[extproc.tls]\ncert_file = "{cert}"\nkey_file = "{key}"\nclient_ca_file = "{cert}"\n'
    )
    pair = {"certificate_chain": {"filename": cert}, "private_key": {"filename": key}}
    context = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": "pointsman",
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "validation_context": {"trusted_ca": {"filename": cert}},
            **({"tls_certificates": [pair]} if with_certificate else {}),
        },
    }
    envoy_tls = {"name": "tls", "typed_config": context}
    if with_certificate:
        async with mesh(sidecar_tls=sidecar_tls, envoy_tls=envoy_tls) as running:
            assert (await running.chat(ask(CODE))).json()["model"] == "model-of-coder"
    else:
        with pytest.raises(AssertionError, match="not within"):
            async with mesh(sidecar_tls=sidecar_tls, envoy_tls=envoy_tls, within_s=4):
                pass


def without_bodies(listener):
    manager_of(listener)["http_filters"][0]["typed_config"]["processing_mode"][
        "request_body_mode"
    ] = "NONE"


@scenario
async def test_a_wrong_body_mode_is_told_once_in_the_log():
    async with mesh(edit=without_bodies) as running:
        (sidecar,) = running.sidecars
        for _ in range(2):
            await running.chat()
        assert sidecar.log.read_text().count("set the ext_proc filter's request body mode") == 1


def enabled_by_route(listener):
    """As Envoy Gateway does it: off for the listener, on for the routes of a policy."""
    manager = manager_of(listener)
    ext_proc = manager["http_filters"][0]
    ext_proc["disabled"] = True
    on = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route["typed_per_filter_config"] = {ext_proc["name"]: on}
        route["request_headers_to_add"] = [
            {
                "header": {"key": "authorization", "value": f"Bearer {route['route']['cluster']}"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ]


@scenario
async def test_it_works_where_the_filter_is_enabled_by_route_and_the_chosen_route_sets_its_key():
    async with mesh(edit=enabled_by_route) as running:
        response = await running.chat(ask(CODE), headers={"authorization": "Bearer client"})
        assert response.headers["x-pointsman-attempts"] == "vllm-coder:200"
        (seen,) = running.upstreams["coder"].seen
        assert seen.headers["authorization"] == "Bearer coder"


def test_the_example_is_valid_as_it_stands():
    done = subprocess.run(
        [str(find_envoy()), "--mode", "validate", "-c", str(EXAMPLE), "--log-level", "error"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
