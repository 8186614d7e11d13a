"""The status page's endpoints on a running sidecar: what they say during a fault, and whom they refuse."""

from __future__ import annotations

import asyncio
import signal

import pytest
from gateway import ROUTES, Gateway, gateway, scenario, until

pytestmark = pytest.mark.envoy

POLICY = """
[circuit_breaker]
failure_threshold = 2
cooldown = "60s"
"""
SEMANTIC = (
    ROUTES
    + """
utterances = ["write a python function", "fix this compiler error"]
"""
    + POLICY
)


async def status(running: Gateway):
    answer = await running.client.get(running.metrics_url("/status.json"))
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def tried(running: Gateway, prompt: object = "fix this compiler error", **headers: str):
    while True:
        answer = await running.client.post(
            running.metrics_url("/route"), json={"prompt": prompt}, headers=headers
        )
        if answer.status_code != 429:  # ten a second are tried
            return answer
        await asyncio.sleep(0.05)


@scenario
async def test_fault_shows_with_its_circuit_its_reason_and_a_whole_account() -> None:
    async with gateway(ROUTES + POLICY) as running:
        await running.chat(headers={"x-request-id": "well"})
        await running.fault("primary", "5xx")
        for _ in range(2):
            await running.chat()
        await running.chat(headers={"x-request-id": "skipped"})

        async def settled():
            found = await status(running)
            return found if found["requests"]["total"] == 4 else None

        found = await until(settled, within_s=20)
        assert found["state"] == "degraded"
        assert [alert["code"] for alert in found["alerts"]] == ["circuit_open"]
        primary = found["upstreams"][0]
        assert (primary["upstream"], primary["circuit"]["state"]) == ("vllm-primary", "open")
        assert 0 < primary["circuit"]["half_open_in_s"] <= 60
        reasons = {row["reason"]: row["total"] for row in found["fallbacks"]}
        assert reasons == {"5xx": 2, "circuit_open": 1}
        outcomes = found["requests"]["outcomes"]
        assert outcomes["served"]["total"] == 1
        assert outcomes["served_by_fallback"]["total"] == 3
        assert [each["id"] for each in found["last_requests"]][::3] == ["skipped", "well"]
        later = await until(lambda: adds_up(running, requests=4), within_s=20)
        assert later["audit"]["checks"][0]["parts"] == {"outcomes": 4, "unseen": 0, "offset": 0}
        assert later["upstreams"][0]["circuit"]["half_open_in_s"] < 60


async def adds_up(running: Gateway, *, requests: int):
    audit = (found := await status(running))["audit"]
    told = audit["state"] == "adds_up" and audit["checks"][0]["envoy"] == requests
    return found if told else None


@scenario
async def test_prompt_that_is_tried_is_decided_like_any_and_counts_as_none() -> None:
    async with gateway(SEMANTIC) as running:
        answer = (await tried(running)).json()
        assert (answer["route"], answer["reason"]) == ("code", "semantic")
        assert answer["scores"]["code"]["score"] > answer["scores"]["code"]["threshold"]
        assert answer["timings"]["embed_ms"] > 0
        through_envoy = await running.client.post(
            "/route", json={"prompt": "fix this compiler error"}
        )
        assert {**through_envoy.json(), "timings": answer["timings"]} == answer
        by_rule = (await tried(running, "what a traceback")).json()
        assert (by_rule["matched"], by_rule["scores"]) == ("traceback", {})
        assert set(by_rule["scores_unasked"]) == {"code"}
        assert (await tried(running, 7)).json()["error"]["code"] == "invalid_prompt"
        await running.settled("pointsman_requests_total", 1)  # the one through Envoy
        log = (running.directory / "sidecar.log").read_text()
        assert "traceback" not in log
        assert "compiler" not in log


@scenario
async def test_other_sites_other_names_other_types_and_long_prompts_are_refused() -> None:
    async with gateway() as running:
        assert (await tried(running, host="evil.example")).status_code == 421
        assert (await tried(running, origin="http://evil.example")).status_code == 403
        cross = {"sec-fetch-site": "cross-site"}
        for path in ("/status.json", "/events", "/"):
            assert (
                await running.client.get(running.metrics_url(path), headers=cross)
            ).status_code == 403
        url = running.metrics_url("/route")
        plain = await running.client.post(
            url, content='{"prompt": "hi"}', headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        broken = await running.client.post(url, content=b"no gzip", headers=packed)
        assert broken.status_code == 415
        assert (await tried(running, "x" * 70_000)).json()["error"]["code"] == "request_too_large"
        assert (await running.client.get(url)).status_code == 405
        # Prometheus may know us by any name.
        named = await running.client.get(
            running.metrics_url("/metrics"), headers={"host": "evil.example"}
        )
        assert named.status_code == 200


@scenario
async def test_page_is_one_file_under_a_strict_policy() -> None:
    async with gateway() as running:
        answer = await running.client.get(running.metrics_url("/"))
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "<title>Pointsman</title>" in answer.text


@scenario
async def test_page_stays_fresh_in_a_flood() -> None:
    async with gateway() as running:

        async def flood() -> None:
            for _ in range(20):
                await asyncio.gather(*(running.chat() for _ in range(20)))

        crowd = asyncio.create_task(flood())
        while not crowd.done():
            assert (await status(running))["loop_age_s"] < 3
            await asyncio.sleep(0.1)
        await crowd
        assert (await status(running))["state"] == "ok"


@scenario
async def test_envoy_that_is_gone_is_told() -> None:
    async with gateway() as running:
        await until(lambda: adds_up(running, requests=0), within_s=20)
        assert running.envoy is not None
        running.envoy.send_signal(signal.SIGKILL)
        running.envoy.wait()

        async def told():
            return [each["code"] for each in (await status(running))["alerts"]] == [
                "envoy_unreadable"
            ]

        await until(told, within_s=20)
