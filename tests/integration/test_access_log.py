"""One JSON line a request from Envoy, with the story and without a secret; and the sidecar's own lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway import CHAT, HOST, ROUTES, Gateway, ask, gateway, scenario, until

from extproc.envoyconf.access_log import FIELDS

pytestmark = pytest.mark.envoy

SECRETS = ("prompt-secret", "sk-secret", "cookie-secret", "query-secret", "agent-secret")


def logging_to(target: object, more: str = "") -> str:
    return f'[log]\naccess = "{target}"\n{more}{ROUTES}'


async def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """As soon as there are so many: Envoy writes them out now and then."""

    def read() -> list[str]:
        found = path.read_text().splitlines() if path.exists() else []
        return found if len(found) >= count else []

    return [json.loads(line) for line in await until(read, within_s=20)]


@scenario
async def test_line_tells_the_story_of_a_request_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    async with gateway(logging_to(path)) as running:
        headers = {
            "authorization": "Bearer sk-secret",
            "x-api-key": "sk-secret",
            "cookie": "a=cookie-secret",
            "user-agent": "agent-secret",
            "x-request-id": "my-id",
        }
        await running.fault("primary", "5xx", status=500)
        answer = await running.chat(
            ask("prompt-secret"), path=f"{CHAT}?key=query-secret", headers=headers
        )
        assert answer.headers["x-request-id"] == "my-id"
        (line,) = await lines(path, 1)
        assert line.keys() == FIELDS.keys()
        assert (line["id"], line["method"], line["path"]) == ("my-id", "POST", CHAT)
        assert (line["status"], line["flags"], line["protocol"]) == (200, "-", "HTTP/1.1")
        assert (line["route"], line["reason"], line["stream"]) == ("chat", "default", "false")
        assert (line["upstream"], line["model"]) == ("vllm-fallback", "model-of-fallback")
        assert line["attempts"] == answer.headers["x-pointsman-attempts"]
        assert line["fallback"] == "5xx"
        assert 0 <= line["body_ms"] <= line["headers_ms"] <= line["duration_ms"] < 30_000
        assert line["bytes_out"] == len(answer.content)
        assert line["time"].endswith("Z")
        text = path.read_text()
        assert not [secret for secret in SECRETS if secret in text]


@scenario
async def test_clients_values_are_bounded_and_escaped_and_never_in_our_name(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    odd = 'a"b\\c\t{"status":1}' + "x" * 500
    forged = {"x-pointsman-route": "forged", "x-pointsman-attempts": "forged:200"}
    async with gateway(logging_to(path)) as running:
        await running.chat(path="/" + "p" * 5000, headers={"x-request-id": odd, **forged})
        await running.client.get('/"quoted"', headers=forged)
        # Refused before Envoy strips what begins like ours.
        reader, writer = await asyncio.open_connection(HOST, running.listen)
        writer.write(b"GET / HTTP/1.1\r\nx-pointsman-route: forged\r\n\r\n")
        assert (await reader.read(12)).endswith(b"400")
        writer.close()
        first, second, third = await lines(path, 3)
        assert first["id"] == odd[:64]
        assert first["path"] == ("/" + "p" * 5000)[:256]
        assert second["path"] in ('/"quoted"', "/%22quoted%22")
        assert (third["status"], "route" in third) == (400, False)
        assert "forged" not in path.read_text()


@scenario
async def test_leavers_refusals_and_local_answers_have_a_line_too(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    async with gateway(logging_to(path)) as running:
        await running.fault("primary", "hang")
        with contextlib.suppress(httpx.TimeoutException):
            await running.client.post(CHAT, json=ask(), timeout=0.2)
        await running.fault("primary", None)
        await running.client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
        await running.client.get("/v1/models")
        running.kill_sidecar()
        await running.chat()
        left, refused, listed, bypassed = await lines(path, 4)
        assert (left["status"], left["flags"]) == (0, "DC")
        assert left["attempts"] == "vllm-primary:"
        assert (refused["status"], refused["details"]) == (400, "invalid_json")
        assert (listed["path"], listed["upstream"]) == ("/v1/models", "none")
        assert bypassed["reason"] == "degraded_bypassed"


@scenario
async def test_stdout_is_envoys(capfd: pytest.CaptureFixture[str]) -> None:
    found = ""
    async with gateway(logging_to("stdout")) as running:
        await running.chat()

        def read() -> bool:
            nonlocal found
            found += capfd.readouterr().out
            return '"path"' in found

        await until(read, within_s=20)
    assert json.loads(found.splitlines()[0])["route"] == "chat"


@scenario
async def test_off_by_default_and_the_sidecars_own_log_is_json_when_asked() -> None:
    async with gateway(f'[log]\nformat = "json"\n{ROUTES}') as running:
        bootstrap = (running.directory / "envoy.yaml").read_text()
        assert "FileAccessLog" not in bootstrap
        assert "StdoutAccessLog" not in bootstrap
        await open_circuit(running)
        text = (running.directory / "sidecar.log").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        assert {"time", "level", "logger", "message"} <= found[-1].keys()
        assert any("circuit of vllm-primary: closed -> open" in line["message"] for line in found)
        assert any(line["message"] == "sidecar ready" for line in found)


async def open_circuit(running: Gateway) -> None:
    await running.fault("primary", "5xx", status=500)
    for _ in range(6):
        await running.chat()
    await running.settled("pointsman_circuit_transitions_total", 1, to="open")
