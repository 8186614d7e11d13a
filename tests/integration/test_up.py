"""`pointsman up` as a person runs it: ready line, restarts, Ctrl-C, and what it says when it cannot."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from gateway import HOST, ask, free_ports, scenario, until

from extproc.demo import DEMO_CONFIG

pytestmark = pytest.mark.envoy

CODE = "Write a Python function that reverses a linked list"
CODE_ZH = "帮我写一个快速排序的函数"
DEMO_PORTS = (8080, 9901, 9464, 18081, 18082, 18083)


def command(*arguments):
    return [sys.executable, "-m", "extproc.cli", *map(str, arguments)]


def children_of(pid):
    """Pids of living descendants, from /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def busy(port):
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@contextlib.asynccontextmanager
async def running(*arguments, url):
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 90)
            log.seek(0)
            assert line.decode() == f"ready {url}\n", log.read().decode()
            said, page = process.stdout.readline().decode().split()
            assert said == "status"
            assert "<title>Pointsman</title>" in httpx.get(page).text
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            await asyncio.to_thread(process.wait)
            process.stdout.close()


@pytest.mark.skipif(any(map(busy, DEMO_PORTS)), reason="a demo port is in use on this machine")
@scenario
async def test_demo_routes_by_meaning_in_two_languages_falls_over_and_ends_what_it_started():
    url = "http://127.0.0.1:8080"
    async with (
        running("up", "--demo", url=url) as process,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        for text in (CODE, CODE_ZH):
            response = await client.post("/v1/chat/completions", json=ask(text))
            assert response.headers["x-pointsman-route"] == "code"
            assert response.headers["x-pointsman-reason"] == "semantic"
            assert response.headers["x-pointsman-upstream"] == "coder"
        await client.post("http://127.0.0.1:18081/demo/fault", json={"kind": "5xx"})
        response = await client.post("/v1/chat/completions", json=ask(CODE))
        assert response.headers["x-pointsman-fallback"] == "5xx"
        assert response.headers["x-pointsman-upstream"] == "general"
        explained = (await client.post("/route", json={"prompt": CODE_ZH})).json()
        assert explained["route"] == "code"
        assert explained["scores"]["code"]["score"] > explained["scores"]["math"]["score"]

        started = children_of(process.pid)
        assert len(started) >= 4  # upstreams, sidecar, its worker, Envoy
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 30) == 0
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
        assert not any(map(busy, DEMO_PORTS))


def own_config(directory):
    """The demo on free ports, so that it can run beside anything."""
    text = DEMO_CONFIG.read_text(encoding="utf-8")
    ports = free_ports(len(DEMO_PORTS))
    for fixed, free in zip(DEMO_PORTS, ports, strict=True):
        text = text.replace(f":{fixed}", f":{free}")
    path = directory / "pointsman.toml"
    path.write_text(text, encoding="utf-8")
    return path, ports


def sidecar_of(pid):
    """Its pid and its arguments."""
    for child in children_of(pid):
        arguments = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if "serve" in arguments:
            return child, arguments
    raise AssertionError("no sidecar")


@scenario
async def test_killed_sidecar_is_replaced_while_requests_go_on(tmp_path):
    path, ports = own_config(tmp_path)
    url = f"http://{HOST}:{ports[0]}"
    async with (
        running("up", "--config", path, url=url) as process,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        sidecar, _ = sidecar_of(process.pid)
        path.write_text(
            "edited, and not yet whole"
        )  # for the next start; nothing here reads it again
        os.kill(sidecar, signal.SIGKILL)
        response = await client.post("/v1/chat/completions", json=ask(CODE))
        assert response.headers["x-pointsman-reason"] == "degraded_bypassed"
        assert response.headers["x-pointsman-upstream"] == "rule"  # no model server runs here

        async def decided():
            answer = await client.post("/route", json={"prompt": CODE})
            return answer.status_code == 200 and answer.json()["reason"] == "semantic"

        await until(decided, within_s=30)


@scenario
async def test_what_children_read_when_they_start_again_is_held_against_cleaners_of_tmp(tmp_path):
    """systemd-tmpfiles left Envoy without its bootstrap after ten days, for the next time it starts."""
    path, ports = own_config(tmp_path)
    async with running("up", "--config", path, url=f"http://{HOST}:{ports[0]}") as process:
        _, arguments = sidecar_of(process.pid)
        folder = Path(arguments[arguments.index("--config") + 1]).parent
        assert {"envoy.yaml", "pointsman.toml"} <= {each.name for each in folder.iterdir()}
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):  # which it tries, and then leaves the folder alone
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    assert not folder.exists()


@scenario
async def test_killed_up_takes_everything_with_it(tmp_path):
    path, ports = own_config(tmp_path)
    async with running("up", "--config", path, url=f"http://{HOST}:{ports[0]}") as process:
        started = children_of(process.pid)
        process.kill()
        await asyncio.to_thread(process.wait)
        await until(lambda: not any(map(busy, ports[:3])))
        await until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in started))


def outcome(*arguments, **environ):
    return subprocess.run(
        command(*arguments),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )


def test_busy_port_is_one_line_with_the_key_that_changes_it(tmp_path):
    path, ports = own_config(tmp_path)
    with socket.socket() as holder:
        holder.bind((HOST, ports[0]))
        holder.listen()
        ended = outcome("up", "--config", path)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert str(ports[0]) in line
    assert "[server] listen" in line


def test_faults_of_a_config_are_lines_and_exit_2(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[upstream.a]\nbase_url = "nope"\nmodle = "x"\n')
    for arguments in (("check", path), ("up", "--config", path), ("render", path)):
        ended = outcome(*arguments)
        assert ended.returncode == 2
        assert f"{path}:3: upstream.a.modle" in ended.stderr
        assert "model" in ended.stderr


def test_help_of_every_command_is_short_and_exits_0():
    for arguments in ((), ("up",), ("serve",), ("check",), ("render",), ("route",)):
        ended = outcome(*arguments, "--help")
        assert ended.returncode == 0
        assert "usage: pointsman" in ended.stdout
    assert outcome().returncode == 2


def test_missing_model_file_is_named(tmp_path):
    path, _ = own_config(tmp_path)
    path.write_text(path.read_text() + '\n[router.encoder]\npath = "/nowhere/model.onnx"\n')
    ended = outcome("route", "hello", "--config", path)
    assert ended.returncode == 1
    assert "/nowhere/model.onnx" in ended.stderr
