"""TLS on both sides and clients' keys: real Envoy, real sockets, certificates and keys that change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from certificates import Authority, Mounted, put
from gateway import CHAT, HOST, ROUTES, Gateway, ask, free_ports, gateway, scenario, until

from extproc.app.audit import compare
from extproc.app.envoy_files import LOOK_EVERY_S
from extproc.core.errors import INVALID_API_KEY, error_body

pytestmark = pytest.mark.envoy

KEY_A, KEY_B = "sk-team-a-0123456789", "sk-team-b-0123456789"
WRONG = "sk-wrong-00000000000"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def mounted(tmp_path: Path, authority: Authority) -> Mounted:
    return Mounted(tmp_path / "tls", authority.issue())


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    put(path, f"team-a {KEY_A}\nteam-b {KEY_B}\n")
    return path


def tls(mounted: Mounted, more: str = "") -> str:
    return f'[server.tls]\ncert_file = "{mounted.cert}"\nkey_file = "{mounted.key}"\n{more}\n'


def auth(keys_file: Path) -> str:
    return f'[server.auth]\nkeys_file = "{keys_file}"\n'


def client_of(
    running: Gateway, trusted: ssl.SSLContext, *, http2: bool = False, **more: object
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"https://{HOST}:{running.listen}",
        verify=trusted,
        http1=not http2,
        http2=http2,
        timeout=30,
        **more,  # type: ignore[arg-type]
    )


# --- TLS on the listener -----------------------------------------------------------------------------


@scenario
async def test_clients_are_served_over_both_protocols_and_verify_the_certificate(
    mounted: Mounted, authority: Authority, tmp_path: Path
) -> None:
    async with gateway(server_keys=tls(mounted)) as running:
        for http2 in (False, True):
            async with client_of(running, authority.trusted(), http2=http2) as client:
                answer = await client.post(CHAT, json=ask())
                assert (answer.status_code, answer.http_version) == (
                    200,
                    "HTTP/2" if http2 else "HTTP/1.1",
                )
                assert answer.headers["x-pointsman-upstream"] == "vllm-primary"
        stranger = Authority(tmp_path, "stranger")
        async with client_of(running, stranger.trusted()) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.post(CHAT, json=ask())
        with pytest.raises(httpx.TransportError):
            await running.client.post(CHAT, json=ask())  # in clear
        if shutil.which("curl"):
            command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_version} %{http_code}"]
            url = f"https://localhost:{running.listen}/v1/models"
            done = await asyncio.to_thread(
                subprocess.run,
                [*command, "--cacert", str(authority.ca_file), url],
                capture_output=True,
                check=True,
            )
            assert done.stdout.split() in ([b"2", b"200"], [b"1.1", b"200"])


@scenario
async def test_the_oldest_protocol_is_the_configured_one(
    mounted: Mounted, authority: Authority
) -> None:
    async with gateway(server_keys=tls(mounted)) as running:
        assert await asyncio.to_thread(served_version, running, authority) == "TLSv1.2"
    async with gateway(server_keys=tls(mounted, 'min_version = "TLSv1_3"')) as running:
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            await asyncio.to_thread(served_version, running, authority)


def served_version(running: Gateway, authority: Authority) -> str | None:
    """To a client that knows no more than TLS 1.2."""
    context = authority.trusted()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((HOST, running.listen)) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as secured,
    ):
        return secured.version()


def served_certificate(running: Gateway) -> str:
    return ssl.get_server_certificate((HOST, running.listen))


@scenario
async def test_a_renewed_certificate_is_served_without_a_restart_and_no_request_is_lost(
    mounted: Mounted, authority: Authority
) -> None:
    async with gateway(server_keys=tls(mounted)) as running:
        statuses: list[int] = []
        over = asyncio.Event()

        async def load() -> None:
            while not over.is_set():
                async with client_of(running, authority.trusted()) as client:
                    statuses.append((await client.get("/v1/models")).status_code)

        loading = asyncio.create_task(load())
        old = await asyncio.to_thread(served_certificate, running)

        async def renewed() -> bool:
            return await asyncio.to_thread(served_certificate, running) != old

        mounted.replace(authority.issue())
        await until(renewed)
        old = await asyncio.to_thread(served_certificate, running)
        # A pair that does not fit together changes nothing; whole again, it is served.
        put(mounted.key, authority.issue().private_key_pem.bytes())
        put(mounted.cert, "half a certifi")
        for _ in range(5):
            assert not await renewed()
            await asyncio.sleep(0.05)
        mounted.replace(authority.issue())
        await until(renewed)
        over.set()
        await loading
        assert set(statuses) == {200}


@scenario
async def test_a_secret_that_kubernetes_swaps_is_followed(
    tmp_path: Path, authority: Authority
) -> None:
    """kubelet's AtomicWriter: files are links into ..data, itself a link that is renamed over."""
    folder = tmp_path / "secret"
    folder.mkdir()

    def publish(number: int) -> None:
        Mounted(folder / f"..{number}", authority.issue())
        (folder / "..data_tmp").symlink_to(f"..{number}")
        (folder / "..data_tmp").replace(folder / "..data")

    publish(1)
    for name in ("tls.crt", "tls.key"):
        (folder / name).symlink_to(f"..data/{name}")
    text = f'[server.tls]\ncert_file = "{folder}/tls.crt"\nkey_file = "{folder}/tls.key"\n'
    async with gateway(server_keys=text) as running:
        old = await asyncio.to_thread(served_certificate, running)
        publish(2)

        async def renewed() -> bool:
            return await asyncio.to_thread(served_certificate, running) != old

        await until(renewed)


@scenario
async def test_certificate_and_key_may_lie_in_different_folders(
    tmp_path: Path, authority: Authority
) -> None:
    cert, key = tmp_path / "certs" / "my.crt", tmp_path / "private" / "my.key"
    for path in (cert, key):
        path.parent.mkdir()

    def renew() -> None:
        leaf = authority.issue()
        put(cert, b"".join(each.bytes() for each in leaf.cert_chain_pems))
        put(key, leaf.private_key_pem.bytes())

    renew()
    text = f'[server.tls]\ncert_file = "{cert}"\nkey_file = "{key}"\n'
    async with gateway(server_keys=text) as running:
        old = await asyncio.to_thread(served_certificate, running)
        renew()

        async def renewed() -> bool:
            return await asyncio.to_thread(served_certificate, running) != old

        await until(renewed)


@scenario
async def test_with_a_client_ca_only_its_clients_come_in(
    mounted: Mounted, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    theirs = Mounted(tmp_path / "client", authority.issue("client.example"))
    false = Mounted(tmp_path / "false", stranger.issue("client.example"))
    more = f'client_ca_file = "{authority.ca_file}"'
    async with gateway(server_keys=tls(mounted, more)) as running:
        for shown, comes_in in ((None, False), (false, False), (theirs, True)):
            trusted = authority.trusted()
            if shown is not None:
                trusted.load_cert_chain(shown.cert, shown.key)
            async with client_of(running, trusted) as client:
                if comes_in:
                    assert (await client.post(CHAT, json=ask())).status_code == 200
                else:
                    # With TLS 1.3 the refusal may come behind the handshake, while the request is written.
                    with pytest.raises((httpx.TransportError, ssl.SSLError)):
                        await client.post(CHAT, json=ask())


# --- clients' keys -----------------------------------------------------------------------------------


@scenario
async def test_only_a_known_key_comes_in_and_none_goes_any_further(
    keys_file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    config = f'[log]\naccess = "{log}"\n{ROUTES}'
    own = 'api_key_env = "PRIMARY_KEY"\n'
    async with gateway(
        config, server_keys=auth(keys_file), upstream_keys={"primary": own}
    ) as running:
        everywhere = {**bearer(KEY_A), "x-api-key": KEY_A, "api-key": KEY_A}
        for upstream in ("primary", "fallback"):  # one with a key of ours, one without
            answer = await running.chat(ask(model=upstream), headers=everywhere)
            assert answer.status_code == 200
            (seen,) = running.upstreams[upstream].seen
            sent = {name.lower(): value for name, value in seen.headers.items()}
            ours = {"authorization": "Bearer sk-primary"} if upstream == "primary" else {}
            assert {
                name: value
                for name, value in sent.items()
                if name in ("authorization", "x-api-key", "api-key", "x-pointsman-client")
            } == ours
            assert KEY_A not in str(sent)
        assert (await running.chat(headers={"x-api-key": KEY_B})).status_code == 200

        protected = (
            ("POST", CHAT, ask()),
            ("POST", "/api/v1/generate", {"prompt": "hi"}),
            ("POST", "/route", {"prompt": "hi"}),
            ("GET", "/v1/models", None),
            ("GET", "/anything", None),
        )
        for headers in (
            {},
            bearer(WRONG),
            {"authorization": "Bearer"},
            {"authorization": f"Basic {KEY_A}"},
            bearer(KEY_A[:-1]),
            {"api-key": KEY_A},
            {"cookie": f"authorization={KEY_A}"},
            {**bearer(WRONG), "x-api-key": KEY_A},
            {"x-pointsman-client": "team-a"},
        ):
            for method, path, body in protected:
                answer = await running.client.request(method, path, json=body, headers=headers)
                assert answer.status_code == 401, (headers, path)
                assert answer.content == error_body(INVALID_API_KEY)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-pointsman-reason"] == "local"
        turned_away = 9 * len(protected)
        await running.settled("pointsman_requests_total", turned_away, outcome="rejected")
        await running.settled("pointsman_requests_total", 3, outcome="served")

        text = await until(
            lambda: (text := log.read_text()).count("\n") == turned_away + 3 and text, within_s=20
        )
        assert not any(key in text for key in (KEY_A, KEY_B, WRONG))
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["client"] for line in lines[:3]] == ["team-a", "team-a", "team-b"]
        assert all(line["client"] is None for line in lines[3:])
        assert {line["details"] for line in lines[3:]} == {"missing_api_key", "unknown_api_key"}


@scenario
async def test_a_burst_of_wrong_keys_is_counted_exactly(keys_file: Path) -> None:
    count = 300
    async with gateway(server_keys=auth(keys_file)) as running:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=running.client.base_url, timeout=60, limits=limits
        ) as client:
            answers = await asyncio.gather(
                *(client.post(CHAT, json=ask(), headers=bearer(WRONG)) for _ in range(count))
            )
        assert [answer.status_code for answer in answers] == [401] * count
        await running.settled("pointsman_requests_total", count, outcome="rejected")
        assert await running.metric("pointsman_requests_total") == count
        assert await running.metric("pointsman_decisions_total") == 0
        found = await compare(
            f"http://{HOST}:{running.admin}", running.metrics_url(""), wait_s=15.0
        )
        assert found.adds_up, found
        assert not running.upstreams["primary"].seen


@contextlib.contextmanager
def stopped(running: Gateway) -> Iterator[None]:
    assert running.sidecar is not None
    running.sidecar.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        running.sidecar.send_signal(signal.SIGCONT)


@scenario
async def test_keys_are_asked_for_whatever_becomes_of_the_sidecar(keys_file: Path) -> None:
    config = ROUTES.replace('deadline = "5s"', 'deadline = "100ms"')
    async with gateway(config, server_keys=auth(keys_file)) as running:

        async def are_asked_for() -> None:
            for headers in ({}, bearer(WRONG)):
                assert (await running.chat(headers=headers)).status_code == 401
            answer = await running.chat(headers=bearer(KEY_A))
            assert answer.status_code == 200
            assert answer.headers["x-pointsman-reason"] == "degraded_bypassed"

        with stopped(running):
            await are_asked_for()
        running.kill_sidecar()
        await are_asked_for()
        assert running.envoy is not None
        running.envoy.terminate()
        running.envoy.wait()
        await running.start_envoy()  # without a sidecar: what was written is what holds
        await are_asked_for()


@scenario
async def test_changed_keys_are_in_force_without_a_restart_and_bad_ones_never(
    keys_file: Path,
) -> None:
    async with gateway(server_keys=auth(keys_file)) as running:

        async def status(key: str) -> int:
            return (await running.chat(headers=bearer(key))).status_code

        async def is_revoked() -> bool:
            return await status(KEY_A) == 401

        assert await status(KEY_A) == 200
        put(keys_file, f"team-a {KEY_A}-new\nteam-b {KEY_B}\n")
        await until(is_revoked, within_s=15)
        assert await status(f"{KEY_A}-new") == 200
        assert await status(KEY_B) == 200
        await running.settled("pointsman_client_key_reloads_total", 1, result="ok")

        put(keys_file, "")
        for _ in range(200):
            if await running.metric("pointsman_client_key_reloads_total", result="failed"):
                break
            await asyncio.sleep(0.05)
        assert await status(KEY_B) == 200
        assert await status(WRONG) == 401
        text = (running.directory / "sidecar.log").read_text()
        assert "the file holds no key, so nobody could come in" in text
        assert not any(key in text for key in (KEY_A, KEY_B))
        keys_file.write_text(f"team-c {KEY_A}\n")  # in place, too

        async def is_back() -> bool:
            return await status(KEY_A) == 200

        await until(is_back, within_s=15)
        assert await status(KEY_B) == 401
        assert not any(
            key in (running.directory / "envoy.log").read_text() for key in (KEY_A, KEY_B)
        )


@scenario
async def test_without_its_keys_envoy_does_not_start(keys_file: Path) -> None:
    async with gateway(server_keys=auth(keys_file)) as running:
        assert running.envoy is not None
        running.envoy.terminate()
        running.envoy.wait()
        (running.directory / "client-keys.json").unlink()
        command = [*running.envoy.args]  # type: ignore[misc]
        log = (running.directory / "again.log").open("wb")
        again = subprocess.Popen(command, stderr=log, env=running.environ())
        log.close()
        assert await asyncio.to_thread(again.wait, 20) != 0
        await running.start_envoy()


# --- TLS to the upstreams ----------------------------------------------------------------------------


class TlsFront:
    """TLS in front of a plain server. Mutable: whom it serves, and the server names it was asked for."""

    def __init__(self, leaf: ssl.SSLContext) -> None:
        self.target = ("", 0)
        self.asked_for: list[str | None] = []
        self._context = leaf
        self._server: asyncio.Server | None = None
        leaf.sni_callback = lambda _socket, name, _context: self.asked_for.append(name)

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, HOST, 0, ssl=self._context)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self.target)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    def close(self) -> None:
        assert self._server is not None
        self._server.close()


@contextlib.asynccontextmanager
async def behind_tls(
    folder: Path, signer: Authority, host: str, names: tuple[str, ...], more: str
) -> AsyncIterator[tuple[Gateway, TlsFront]]:
    """A gateway whose primary is `https://HOST`, with a certificate for `names`."""
    mounted = Mounted(folder / "upstream", signer.issue(*names))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(mounted.cert, mounted.key)
    front = TlsFront(context)
    port = await front.start()
    urls = {"primary": f"https://{host}:{port}"}
    try:
        async with gateway(upstream_keys={"primary": more}, base_urls=urls) as running:
            front.target = (HOST, running.upstreams["primary"].port)
            yield running, front
    finally:
        front.close()


@pytest.mark.parametrize(("host", "server_name"), [("localhost", "localhost"), (HOST, None)])
def test_an_upstream_is_trusted_by_its_ca_and_its_name(
    tmp_path: Path, authority: Authority, host: str, server_name: str | None
) -> None:
    @scenario
    async def run() -> None:
        more = f'ca_file = "{authority.ca_file}"\n'
        async with behind_tls(tmp_path, authority, host, (host,), more) as (running, front):
            answer = await running.chat()
            assert answer.headers["x-pointsman-attempts"] == "vllm-primary:200"
            assert set(front.asked_for) == {server_name}

    run()


@pytest.mark.parametrize("wrong", ["ca", "name", "address", "no ca_file"])
def test_a_certificate_that_does_not_hold_is_a_connect_error_and_the_next_upstream_answers(
    tmp_path: Path, authority: Authority, wrong: str
) -> None:
    @scenario
    async def run() -> None:
        signer = Authority(tmp_path, "stranger") if wrong == "ca" else authority
        host = HOST if wrong == "address" else "localhost"
        names = {"name": ("other.example",), "address": ("localhost",)}.get(wrong, ("localhost",))
        more = "" if wrong == "no ca_file" else f'ca_file = "{authority.ca_file}"\n'
        async with behind_tls(tmp_path, signer, host, names, more) as (running, _):
            answer = await running.chat()
            assert answer.status_code == 200
            assert answer.headers["x-pointsman-fallback"] == "connect_error"
            assert answer.headers["x-pointsman-upstream"] == "vllm-fallback"
            assert not running.upstreams["primary"].seen  # not one byte of the request

    run()


@scenario
async def test_a_renewed_ca_is_followed(tmp_path: Path, authority: Authority) -> None:
    """The upstream moves to another CA; its circuit is closed by hand of time, so none is set here."""
    stranger = Authority(tmp_path, "stranger")
    mine = tmp_path / "mine"
    mine.mkdir()
    put(mine / "ca.pem", authority.ca_file.read_bytes())
    more = f'ca_file = "{mine / "ca.pem"}"\n'
    async with behind_tls(tmp_path, stranger, "localhost", ("localhost",), more) as (running, _):
        assert (await running.chat()).headers["x-pointsman-fallback"] == "connect_error"
        put(mine / "ca.pem", stranger.ca_file.read_bytes())

        async def is_trusted() -> bool:
            return "x-pointsman-fallback" not in (await running.chat()).headers

        await until(is_trusted, within_s=10, every_s=0.5)


@scenario
async def test_an_upstreams_key_is_read_from_its_file_and_again_when_it_changes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "key"
    put(path, "sk-one\n")
    own = {"primary": f'api_key_file = "{path}"\n'}
    lenient = ROUTES + "[circuit_breaker]\nfailure_threshold = 1000\n"
    async with gateway(lenient, upstream_keys=own) as running:
        primary = running.upstreams["primary"]

        async def sent() -> list[str]:
            primary.clear_seen()
            await running.chat(headers={**bearer("sk-client"), "x-api-key": "sk-client"})
            assert all("sk-client" not in str(seen.headers) for seen in primary.seen)
            return [seen.headers["authorization"] for seen in primary.seen]

        assert await sent() == ["Bearer sk-one"]
        put(path, "sk-two")

        async def is_two() -> bool:
            return await sent() == ["Bearer sk-two"]

        await until(is_two)
        # Envoy alone would send a blank as a key.
        for bad in ("", " \n\t", "sk three"):
            put(path, bad)
            await asyncio.sleep(3 * LOOK_EVERY_S)
            assert await sent() == ["Bearer sk-two"]
        path.write_text("sk-three\n")  # in place

        async def is_three() -> bool:
            return await sent() == ["Bearer sk-three"]

        await until(is_three)
        assert "sk-" not in (running.directory / "envoy.yaml").read_text()
        dump = await running.client.get(f"http://{HOST}:{running.admin}/config_dump")
        assert "key.primary" in dump.text
        assert "sk-" not in dump.text


@scenario
async def test_no_key_at_all_is_a_fault_of_ours_and_not_a_401(tmp_path: Path) -> None:
    """For a client whose own key was good."""
    path = tmp_path / "key"
    put(path, "sk-one")
    own = {"primary": f'api_key_file = "{path}"\n'}
    config = '[fallback]\nmode = "none"\n' + ROUTES
    async with gateway(config, upstream_keys=own) as running:
        assert (await running.chat()).status_code == 200
        written = running.directory / "key.primary.json"
        put(written, written.read_text().replace("sk-one", ""))

        async def fails() -> bool:
            answer = await running.chat()
            return answer.status_code == 502 and answer.json()["error"]["code"] == "gateway_error"

        await until(fails)


# --- the commands ------------------------------------------------------------------------------------


def pointsman(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "extproc.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **environ},
    )


def config_file(folder: Path, tables: str, upstream: str = "http://127.0.0.1:9") -> Path:
    listen, admin, metrics = free_ports(3)
    path = folder / "pointsman.toml"
    path.write_text(
        f'[server]\nlisten = "{HOST}:{listen}"\n{tables}[admin]\nlisten = "{HOST}:{admin}"\n'
        f'[metrics]\nlisten = "{HOST}:{metrics}"\n[extproc]\nsocket = "{folder}/x.sock"\n'
        f'[upstream.a]\nbase_url = "{upstream}"\nmodel = "m"\ninference_timeout = "300ms"\n'
        '[circuit_breaker]\nfailure_threshold = 3\ncooldown = "2s"\n'
    )
    return path


def test_check_warns_of_files_that_are_elsewhere_and_writing_insists(
    tmp_path: Path, mounted: Mounted, keys_file: Path, authority: Authority
) -> None:
    path = config_file(tmp_path, tls(mounted) + auth(tmp_path / "elsewhere"))
    done = pointsman("check", path)
    assert done.returncode == 0
    assert done.stderr.count("warning: ") == 1
    assert "server.auth.keys_file" in done.stderr
    done = pointsman("render", path, "--write")
    assert done.returncode == 2
    assert "server.auth.keys_file" in done.stderr
    assert not (tmp_path / "envoy.yaml").exists()
    assert "keys_file" in pointsman("up", "--config", path).stderr

    path = config_file(tmp_path, tls(mounted) + auth(keys_file))
    done = pointsman("render", path, "--write")
    assert done.stdout == f"{tmp_path}/envoy.yaml\n"
    assert KEY_A not in (tmp_path / "envoy.yaml").read_text()
    assert KEY_A not in pointsman("render", path).stdout
    mounted.replace(authority.issue(ends_in=timedelta(days=-1)))
    done = pointsman("check", path)
    assert done.returncode == 2
    assert "the certificate expired on" in done.stderr


@scenario
async def test_up_and_drill_work_with_tls_and_keys(
    tmp_path: Path, mounted: Mounted, keys_file: Path, authority: Authority
) -> None:
    (port,) = free_ports(1)
    upstream = f"http://{HOST}:{port}"
    path = config_file(tmp_path, tls(mounted) + auth(keys_file), upstream)
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.demo", "--listen", f"{HOST}:{port}=a")
    )
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.cli", "up", "--config", str(path)),
        stdout=subprocess.PIPE,
    )
    try:
        assert up.stdout is not None
        ready = (await asyncio.wait_for(up.stdout.readline(), 60)).decode().split()
        assert ready[0] == "ready"
        assert ready[1].startswith("https://")
        order = ["drill", "--url", ready[1], "--upstream", "a", "--fault", "5xx", "--config", path]
        trust = ["--ca-file", authority.ca_file]
        done = await asyncio.to_thread(pointsman, *order)
        assert (done.returncode, "--ca-file" in done.stderr) == (1, True)
        done = await asyncio.to_thread(pointsman, *order, *trust)
        assert (done.returncode, "--api-key-env" in done.stderr) == (1, True)
        with_key = ["--api-key-env", "KEY"]
        done = await asyncio.to_thread(lambda: pointsman(*order, *trust, *with_key, KEY=KEY_A))
        assert done.returncode == 0, done.stdout + done.stderr
        assert KEY_A not in done.stdout + done.stderr
        # What `helm test` runs, with what the chart mounts for it.
        script = Path(__file__).parents[2] / "helm" / "pointsman" / "files" / "test.py"
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, script, ready[1], "auto", "--keys-file", keys_file],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "x-pointsman-upstream: a" in done.stdout
        done = await asyncio.to_thread(pointsman, "audit", "--config", path)
        assert "every request is accounted for" in done.stdout, done.stdout + done.stderr
    finally:
        for process in (up, demo):
            process.terminate()
            await process.wait()
