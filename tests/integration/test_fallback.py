"""Who answers when an upstream does not, after how long, and what headers and metrics say of it."""

import asyncio
import json
import time

import httpx
import pytest
from gateway import CHAT, HOST, ask, gateway, scenario, until

pytestmark = pytest.mark.envoy

# fault -> reason, and how often the broken upstream is asked (a retry only where it may help)
FAULTS = {
    "hang": ("timeout", 1),
    "5xx": ("5xx", 2),
    "refused": ("connect_error", 0),
    "reset": ("connect_error", 1),
    "bad_schema": ("bad_schema", 1),
    "context_length": ("context_length", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
@scenario
async def test_next_upstream_answers_and_the_reason_is_told_three_ways(fault):
    reason, visits = FAULTS[fault]
    async with gateway() as gw:
        for stream in (False, True):
            if fault == "bad_schema" and stream:
                continue  # a stream's schema is the client's to read: it is never buffered
            await gw.fault("primary", fault)
            gw.upstreams["primary"].clear_seen()
            response = await gw.chat(ask(stream=stream))
            assert response.status_code == 200
            assert response.headers["x-pointsman-upstream"] == "vllm-fallback"
            assert response.headers["x-pointsman-model"] == "model-of-fallback"
            assert response.headers["x-pointsman-fallback"] == reason
            attempts = response.headers["x-pointsman-attempts"]
            tried_again = "vllm-primary:retried," if fault in ("5xx", "refused") else ""
            assert attempts == f"{tried_again}vllm-primary:{reason},vllm-fallback:200"
            assert len(gw.upstreams["primary"].seen) == visits
            if stream:
                assert response.text.endswith("data: [DONE]\n\n")
            else:
                assert response.json()["model"] == "model-of-fallback"
        count = 1 if fault == "bad_schema" else 2
        labels = {"reason": reason, "from": "vllm-primary", "to": "vllm-fallback"}
        await gw.settled("model_fallback_total", count, **labels)
        await gw.settled("pointsman_requests_total", count, outcome="served_by_fallback")


@pytest.mark.parametrize("variant", ["html", "torn_json", "no_choices", "empty_choices"])
@scenario
async def test_every_kind_of_unreadable_answer_is_a_bad_schema(variant):
    async with gateway() as gw:
        await gw.fault("primary", "bad_schema", variant=variant)
        response = await gw.chat()
        assert response.headers["x-pointsman-fallback"] == "bad_schema"
        assert response.headers["x-pointsman-upstream"] == "vllm-fallback"


@scenario
async def test_rule_answers_last_as_json_sse_or_an_honest_error():
    rule = '[fallback]\nrule_response = "100 % busy, \\"sorry\\" 忙"\n'
    async with gateway(rule) as gw:
        await gw.fault("primary", "5xx")
        await gw.fault("fallback", "hang")
        response = await gw.chat()
        assert response.status_code == 200
        assert response.headers["x-pointsman-upstream"] == "rule"
        assert response.headers["x-pointsman-attempts"] == (
            "vllm-primary:retried,vllm-primary:5xx,vllm-fallback:timeout,rule:200"
        )
        answer = response.json()
        assert answer["model"] == response.headers["x-pointsman-model"] == "pointsman-rule"
        assert answer["choices"][0]["message"]["content"] == '100 % busy, "sorry" 忙'
        streamed = await gw.chat(ask(stream=True))
        assert streamed.headers["content-type"] == "text/event-stream"
        first, done, _ = streamed.text.split("\n\n")
        assert json.loads(first.removeprefix("data: "))["object"] == "chat.completion.chunk"
        assert done == "data: [DONE]"
        legacy = await gw.chat({"prompt": "x", "max_tokens": 3}, path="/v1/completions")
        assert legacy.json()["choices"][0]["text"] == '100 % busy, "sorry" 忙'
        embedding = await gw.chat({"input": "x"}, path="/v1/embeddings")
        assert embedding.status_code == 503
        assert embedding.json()["error"]["code"] == "no_upstream_available"
        await gw.settled("pointsman_requests_total", 3, outcome="served_by_rule")
        await gw.settled("pointsman_requests_total", 1, outcome="failed")


TWICE = "vllm-primary:retried,vllm-primary:5xx"
TWICE_MORE = "vllm-fallback:retried,vllm-fallback:5xx"


@pytest.mark.parametrize(
    ("mode", "attempts", "status"),
    [
        ("model_then_rule", f"{TWICE},{TWICE_MORE},rule:200", 200),
        ("model_only", f"{TWICE},{TWICE_MORE}", 503),
        ("rule_only", f"{TWICE},rule:200", 200),
        ("none", TWICE, 503),
    ],
)
@scenario
async def test_modes(mode, attempts, status):
    async with gateway(f'[fallback]\nmode = "{mode}"\n') as gw:
        await gw.fault("primary", "5xx")
        await gw.fault("fallback", "5xx")
        response = await gw.chat()
        assert response.headers["x-pointsman-attempts"] == attempts
        assert response.status_code == status
        assert "x-pointsman-fail" not in response.headers
        assert "x-pointsman-status" not in response.headers


@scenario
async def test_a_providers_refusal_is_the_clients_own_and_passes_on():
    async with gateway() as gw:
        await gw.fault("primary", "content_policy")
        response = await gw.chat()
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "content_policy_violation"
        assert response.headers["x-pointsman-attempts"] == "vllm-primary:400"
        await gw.settled("pointsman_requests_total", 1, outcome="rejected")


@scenario
async def test_rate_limit_goes_on_and_the_last_429_passes_as_it_came():
    async with gateway('[fallback]\nmode = "model_only"\n') as gw:
        await gw.fault("primary", "5xx", status=429)
        response = await gw.chat()
        assert response.headers["x-pointsman-fallback"] == "rate_limited"
        await gw.fault("fallback", "5xx", status=429)
        response = await gw.chat()
        assert response.status_code == 429


@pytest.mark.parametrize("status", [429, 503])
@scenario
async def test_refusal_of_an_envoy_that_limits_rates_goes_on_like_any_other(status):
    """Its x-envoy-ratelimited tells Envoys not to try again; on the next upstream, ours must."""
    steering = "x-envoy-ratelimited: true\r\nx-envoy-immediate-health-check-fail: true\r\n"

    async def provider(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} no\r\n{steering}content-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(provider, HOST, 0) as server:
        url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        async with gateway(base_urls={"primary": url}) as gw:
            response = await gw.chat()
            assert response.status_code == 200
            assert response.headers["x-pointsman-upstream"] == "vllm-fallback"
            direct = await gw.chat(ask(model="vllm-primary"), path="/v1/other")
            assert not [name for name in direct.headers if name.startswith("x-envoy-")]


@scenario
async def test_dead_sidecar_degrades_to_the_default_route_and_says_so():
    async with gateway() as gw:
        gw.kill_sidecar()
        for stream in (False, True):
            response = await gw.chat(ask("Traceback", stream=stream))
            assert response.status_code == 200
            assert response.headers["x-pointsman-reason"] == "degraded_bypassed"
            assert response.headers["x-pointsman-route"] == "chat"
            assert response.headers["x-pointsman-upstream"] == "vllm-primary"
        assert {seen.model for seen in gw.upstreams["primary"].seen} == {"model-of-primary"}
        await gw.fault("primary", "hang")
        response = await gw.chat(ask(stream=True))
        assert response.headers["x-pointsman-fallback"] == "timeout"
        assert gw.upstreams["fallback"].seen[0].model == "model-of-fallback"
        await gw.fault("fallback", "refused")
        response = await gw.chat(ask(stream=True))
        assert response.headers["x-pointsman-upstream"] == "rule"
        assert response.text.endswith("data: [DONE]\n\n")
        torn = await gw.client.post(CHAT, content=b'{"model":"auto"')
        assert torn.json()["error"]["code"] == "invalid_json"
        explain = await gw.client.post("/route", json={"prompt": "x"})
        assert explain.status_code == 503
        assert explain.json()["error"]["code"] == "router_unavailable"
        await gw.start_sidecar()
        assert (await gw.chat(ask("Traceback"))).headers["x-pointsman-reason"] == "keyword"


@scenario
async def test_bodies_the_sidecar_never_saw_are_rewritten_in_the_top_level_only():
    bodies = {
        b'{"messages":[{"model":"auto","x":"\\"model\\":\\"auto\\""}],"model":"auto"}': (
            b'{"messages":[{"model":"auto","x":"\\"model\\":\\"auto\\""}],"model":"model-of-primary"}'
        ),
        b" { } ": b' {"model":"model-of-primary" } ',
        b'{"a":1}': b'{"model":"model-of-primary","a":1}',
        b'{"mod\\u0065l" : null , "s":"]}"}': b'{"mod\\u0065l" : "model-of-primary" , "s":"]}"}',
    }
    async with gateway(sidecar=False) as gw:
        for sent, wanted in bodies.items():
            gw.upstreams["primary"].clear_seen()
            await gw.client.post("/generate", content=sent)
            assert gw.upstreams["primary"].seen[0].body == wanted


@scenario
async def test_client_that_leaves_cancels_the_upstream_and_is_its_own_outcome():
    async with gateway() as gw:
        await gw.fault("primary", "slow_headers", delay_s=0.4)
        with pytest.raises(httpx.TimeoutException):
            await gw.chat(timeout=0.15)
        await asyncio.sleep(0.05)
        (seen,) = gw.upstreams["primary"].seen
        assert seen.cancelled
        assert not gw.upstreams["fallback"].seen
        await gw.settled("pointsman_requests_total", 1, outcome="client_gone")


@scenario
async def test_stream_cut_midway_never_looks_complete():
    async with gateway() as gw:
        await gw.fault("primary", "cut_stream")
        with pytest.raises(httpx.RemoteProtocolError):
            await gw.chat(ask(stream=True))
        await gw.settled("pointsman_requests_total", 1, outcome="stream_cut")
        # The same cut in an answer that is read whole is no answer: the next upstream gives one.
        response = await gw.chat()
        assert (
            response.headers["x-pointsman-attempts"]
            == "vllm-primary:connect_error,vllm-fallback:200"
        )


@scenario
async def test_half_an_answer_that_stops_coming_is_a_timeout():
    async with gateway() as gw:
        await gw.fault("primary", "stall_stream")
        response = await gw.chat()
        assert response.headers["x-pointsman-fallback"] == "timeout"
        assert response.headers["x-pointsman-upstream"] == "vllm-fallback"


@scenario
async def test_too_many_at_once_overflow_to_the_next_upstream():
    keys = {"primary": "max_concurrent_requests = 2\n"}
    async with gateway(upstream_keys=keys) as gw:
        await gw.fault("primary", "slow_headers", delay_s=0.3)
        responses = await asyncio.gather(*(gw.chat() for _ in range(8)))
        assert all(response.status_code == 200 for response in responses)
        reasons = [response.headers.get("x-pointsman-fallback") for response in responses]
        assert (
            4 <= reasons.count("overflow") <= 6
        )  # two in flight, and up to two that wait for them


@pytest.mark.parametrize("mode", ["none", "model_only"])
@scenario
async def test_without_a_rule_an_open_circuit_is_an_honest_503_with_every_header(mode):
    config = f"""
[fallback]
mode = "{mode}"
[circuit_breaker]
failure_threshold = 2
[retry]
max_retries = 0
"""
    async with gateway(config) as gw:
        await gw.fault("primary", "hang")
        await gw.fault("fallback", "hang")
        for _ in range(2):
            assert (await gw.chat()).status_code == 504
        first = await gw.chat()  # Envoy has ejected what it could, perhaps before the gate
        await gw.settled("pointsman_circuit_state", 2, upstream="vllm-primary")
        for response in (first, await gw.chat()):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "no_upstream_available"
            for name in ("route", "reason", "upstream", "model"):
                assert response.headers[f"x-pointsman-{name}"]
        assert response.headers["x-pointsman-fallback"] == "circuit_open"
        await gw.settled("pointsman_requests_total", 4, outcome="failed")


@scenario
async def test_client_that_leaves_a_stream_cancels_the_upstream():
    async with gateway() as gw:
        gw.upstreams["primary"].chunk_gap_s = 0.5
        async with gw.client.stream("POST", CHAT, json=ask(stream=True)) as response:
            async for _ in response.aiter_raw():
                break
        left_at_s = time.monotonic()
        (seen,) = await until(lambda: [s for s in gw.upstreams["primary"].seen if s.cancelled])
        assert seen.ended_at_s - left_at_s < 0.4  # before the next chunk could have told
        await gw.settled("pointsman_requests_total", 1, outcome="client_gone")


@scenario
async def test_retry_budget_caps_what_a_failing_upstream_is_asked_again():
    async with gateway("[circuit_breaker]\nfailure_threshold = 1000\n") as gw:
        await gw.fault("primary", "5xx")
        responses = await asyncio.gather(*(gw.chat() for _ in range(60)))
        assert all(response.status_code == 200 for response in responses)
        visits = len(gw.upstreams["primary"].seen)
        # A fifth of what is in flight; without a budget every one of the 60 is asked twice.
        assert 60 < visits < 100
