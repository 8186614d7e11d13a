"""The circuit policy on the real Envoy: a hung model costs five requests, then milliseconds."""

import asyncio
import contextlib
import subprocess
import time

import httpx
import pytest
from gateway import ROUTES, ask, gateway, scenario, until

from extproc.demo.upstream import ScriptedUpstream

pytestmark = pytest.mark.envoy

POLICY = """
[circuit_breaker]
failure_threshold = 5
window = "30s"
cooldown = "2s"
half_open_max_requests = 3
"""
CONFIG = POLICY + ROUTES
FAST_S = 0.5  # below the 0.8 s that a wait for the hung primary takes


async def timed(gw, body=None):
    begun = time.monotonic()
    response = await gw.chat(body)
    return response, time.monotonic() - begun


async def open_circuit(gw, upstream="primary", requests=5):
    responses = await asyncio.gather(*(gw.chat(ask(model=upstream)) for _ in range(requests)))
    assert all(response.status_code == 200 for response in responses)
    await gw.settled("pointsman_circuit_state", 2, upstream=f"vllm-{upstream}")


@scenario
async def test_hung_primary_costs_five_requests_then_none_reaches_it_until_a_trial_succeeds():
    async with gateway(CONFIG) as gw:
        await gw.fault("primary", "hang")
        await open_circuit(gw)
        assert len(gw.upstreams["primary"].seen) == 5
        for stream in (False, True):
            response, took_s = await timed(gw, ask(stream=stream))
            assert took_s < FAST_S
            assert response.headers["x-pointsman-fallback"] == "circuit_open"
            assert response.headers["x-pointsman-attempts"] == (
                "vllm-primary:circuit_open,vllm-fallback:200"
            )
        assert len(gw.upstreams["primary"].seen) == 5
        await gw.settled("model_fallback_total", 2, reason="circuit_open", to="vllm-fallback")

        await asyncio.sleep(2.1)
        responses = await asyncio.gather(*(timed(gw) for _ in range(10)))
        assert len(gw.upstreams["primary"].seen) == 5 + 3  # half_open_max_requests at once
        assert sum(took_s > FAST_S for _, took_s in responses) == 3
        await gw.settled("pointsman_circuit_state", 2, upstream="vllm-primary")  # a trial failed

        await gw.fault("primary", None)
        await asyncio.sleep(2.1)
        response, _ = await timed(gw)
        assert response.headers["x-pointsman-upstream"] == "vllm-primary"
        await gw.settled("pointsman_circuit_state", 0, upstream="vllm-primary")
        for to, count in (("open", 2), ("half_open", 2), ("closed", 1)):
            await gw.settled(
                "pointsman_circuit_transitions_total", count, upstream="vllm-primary", to=to
            )


@scenario
async def test_four_failures_and_a_success_repeated_open_the_circuit():
    async with gateway(CONFIG + "[retry]\nmax_retries = 0\n") as gw:
        await gw.fault("primary", "flaky", fail=4, of=5)
        for _ in range(7):
            await gw.chat()
        await gw.settled("pointsman_circuit_state", 2, upstream="vllm-primary")
        assert (await gw.envoy_stat("cluster.tier.primary.outlier_detection.ejections_total")) == 0


@scenario
async def test_two_chains_share_one_state_and_a_fallback_has_a_circuit_of_its_own():
    async with gateway(CONFIG) as gw:
        await gw.fault("fallback", "hang")
        await open_circuit(gw, "fallback")
        visits = len(gw.upstreams["fallback"].seen)
        code = await gw.chat(ask("traceback"))  # fallback is first in that chain
        assert code.headers["x-pointsman-attempts"] == "vllm-fallback:circuit_open,vllm-primary:200"
        await gw.fault("primary", "5xx")
        chat = await gw.chat()
        assert chat.headers["x-pointsman-upstream"] == "rule"
        assert chat.headers["x-pointsman-attempts"].endswith("vllm-fallback:circuit_open,rule:200")
        assert len(gw.upstreams["fallback"].seen) == visits
        assert await gw.metric("pointsman_circuit_state", upstream="vllm-primary") == 0


@scenario
async def test_a_client_whose_request_id_is_no_text_hides_nothing():
    """It stands in the records of its request and attempts, beside those of everybody else."""
    async with gateway(CONFIG) as gw:
        await gw.fault("primary", "5xx")
        for _ in range(8):
            response = await gw.chat(headers=[(b"x-request-id", b"\xff\xfe")])
            assert response.status_code == 200
        await gw.settled("pointsman_requests_total", 8)
        await gw.settled("pointsman_circuit_transitions_total", 1, to="open")


@scenario
async def test_all_circuits_open_is_the_rule_in_milliseconds_for_large_bodies_too():
    async with gateway(CONFIG) as gw:
        await gw.fault("primary", "hang")
        await gw.fault("fallback", "hang")
        await open_circuit(gw)
        await gw.settled("pointsman_circuit_state", 2, upstream="vllm-fallback")
        response, took_s = await timed(gw, ask("x" * 3_000_000))
        assert response.status_code == 200
        assert response.headers["x-pointsman-attempts"] == (
            "vllm-primary:circuit_open,vllm-fallback:circuit_open,rule:200"
        )
        assert took_s < FAST_S


@scenario
async def test_sidecar_killed_while_open_leaves_outlier_detection_in_charge_and_takes_over_again():
    async with gateway(CONFIG) as gw:
        await gw.fault("primary", "hang")
        await open_circuit(gw)
        gw.kill_sidecar()
        response, took_s = await timed(gw)
        assert response.headers["x-pointsman-reason"] == "degraded_bypassed"
        assert response.headers["x-pointsman-fallback"] == "circuit_open"  # Envoy had ejected it
        assert took_s < FAST_S
        await asyncio.sleep(2.5)  # un-ejected: a request is tried, and not one is lost
        responses = await asyncio.gather(*(timed(gw) for _ in range(5)))
        assert all(response.status_code == 200 for response, _ in responses)
        await gw.start_sidecar()
        await asyncio.sleep(2.5)
        await open_circuit(gw)
        visits = len(gw.upstreams["primary"].seen)
        response, took_s = await timed(gw)
        assert took_s < FAST_S
        assert len(gw.upstreams["primary"].seen) == visits
        await gw.fault("primary", None)
        await asyncio.sleep(2.1)
        assert (await gw.chat()).headers["x-pointsman-upstream"] == "vllm-primary"


@scenario
async def test_retry_storm_never_reaches_a_primary_whose_circuit_is_open():
    # No trial meets the storm, however long it takes: each client that leaves one lets the next in.
    async with gateway(CONFIG.replace('cooldown = "2s"', 'cooldown = "60s"')) as gw:
        await gw.fault("primary", "hang")

        async def impatient(tries: int) -> int:
            for _ in range(tries):  # each client gives up after 0.7 s and asks again
                try:
                    return (await gw.chat(timeout=0.7)).status_code
                except httpx.TimeoutException:
                    continue
            return 0

        await asyncio.gather(*(impatient(3) for _ in range(20)))  # before the circuit opens
        await open_circuit(gw)
        visits = len(gw.upstreams["primary"].seen)
        results = await asyncio.gather(*(impatient(30) for _ in range(200)))
        assert results.count(200) == 200
        assert len(gw.upstreams["primary"].seen) == visits


@scenario
async def test_trial_whose_client_leaves_gives_its_token_back():
    config = CONFIG.replace("half_open_max_requests = 3", "half_open_max_requests = 1")
    async with gateway(config) as gw:
        await gw.fault("primary", "hang")
        await open_circuit(gw)
        await asyncio.sleep(2.1)
        with pytest.raises(httpx.TimeoutException):
            await gw.chat(timeout=0.2)
        await gw.settled("pointsman_requests_total", 1, outcome="client_gone")
        await gw.fault("primary", None)
        response = await gw.chat()  # the token is free again: this is the next trial
        assert response.headers["x-pointsman-upstream"] == "vllm-primary"


@scenario
async def test_long_stream_closes_the_circuit_while_it_still_runs():
    config = CONFIG.replace("half_open_max_requests = 3", "half_open_max_requests = 1")
    async with gateway(config) as gw:
        await gw.fault("primary", "hang")
        await open_circuit(gw)
        await gw.fault("primary", None)
        gw.upstreams["primary"].chunk_gap_s = 1.5
        await asyncio.sleep(2.1)
        async with gw.client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as trial:
            assert trial.headers["x-pointsman-upstream"] == "vllm-primary"
            await gw.settled("pointsman_circuit_state", 0, upstream="vllm-primary")
            assert not trial.is_stream_consumed


@scenario
async def test_retry_after_is_waited_for_up_to_a_cap_and_never_after_a_timeout():
    async with gateway(CONFIG) as gw:
        await gw.fault("primary", "5xx", status=429, retry_after_s=1, times=1)
        response, took_s = await timed(gw)
        assert response.headers["x-pointsman-attempts"] == "vllm-primary:retried,vllm-primary:200"
        assert 0.9 < took_s < 2.5
        await gw.fault("primary", "5xx", status=429, retry_after_s=60)
        response, took_s = await timed(gw)
        assert response.headers["x-pointsman-upstream"] == "vllm-fallback"
        assert took_s < 1.5
        await gw.fault("primary", "hang")
        gw.upstreams["primary"].clear_seen()
        await gw.chat()
        assert len(gw.upstreams["primary"].seen) == 1


@scenario
async def test_client_that_leaves_during_a_back_off_is_counted_and_asked_for_no_more():
    async with gateway(CONFIG + '[retry]\nbase = "2s"\nmax = "4s"\n') as gw:
        await gw.fault("primary", "5xx", status=429, retry_after_s=2)
        with pytest.raises(httpx.TimeoutException):
            await gw.chat(timeout=0.5)
        await gw.settled("pointsman_requests_total", 1, outcome="client_gone")
        await asyncio.sleep(2.2)
        assert len(gw.upstreams["primary"].seen) == 1
        assert not gw.upstreams["fallback"].seen


@scenario
async def test_counted_errors_decide_what_opens():
    rate_limited = CONFIG.replace(
        "half_open_max_requests = 3",
        'half_open_max_requests = 3\ncounted_errors = ["rate_limited"]',
    )
    async with gateway(rate_limited) as gw:
        await gw.fault("primary", "hang")
        for _ in range(2):
            await asyncio.gather(*(gw.chat() for _ in range(5)))
        assert await gw.metric("pointsman_circuit_state", upstream="vllm-primary") == 0
        assert await gw.envoy_stat("cluster.tier.primary.outlier_detection.ejections_total") == 0
        await gw.fault("primary", "5xx", status=429)
        for _ in range(5):
            await gw.chat()
        await gw.settled("pointsman_circuit_state", 2, upstream="vllm-primary")


@scenario
async def test_first_token_that_does_not_come_falls_over_and_live_streams_pass_untouched():
    keys = {"primary": 'first_token_timeout = "400ms"\n'}
    async with gateway(CONFIG, upstream_keys=keys) as gw:
        await gw.fault("primary", "slow_first_token", delay_s=3)
        response, took_s = await timed(gw, ask(stream=True))
        assert response.headers["x-pointsman-attempts"] == "vllm-primary:timeout,vllm-fallback:200"
        assert response.text.endswith("data: [DONE]\n\n")
        assert 0.4 <= took_s < 1.5
        await until(lambda: gw.upstreams["primary"].seen[0].cancelled)

        await gw.fault("primary", None)
        gw.upstreams["primary"].chunk_gap_s = 0.5  # longer than the limit, which is for the first
        arrivals = []
        begun = time.monotonic()
        async with gw.client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as live:
            assert live.headers["x-pointsman-upstream"] == "vllm-primary"
            async for last_piece in live.aiter_raw():
                piece = last_piece
                arrivals.append(time.monotonic() - begun)
                if len(arrivals) == 1:
                    # It holds the first chunk only; its gRPC stream takes a moment more to end.
                    await asyncio.sleep(0.1)
                    gw.kill_sidecar()
        assert piece.endswith(b"data: [DONE]\n\n")
        assert arrivals[0] < 0.4
        assert len(arrivals) > 3
        # Without a sidecar nobody watches, and streams pass all the same.
        response = await gw.chat(ask(stream=True))
        assert response.headers["x-pointsman-upstream"] == "vllm-primary"


def with_hosts(tmp_path, *lines):
    """A command that becomes Envoy where /etc/hosts says so; skip where one may not."""
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{line}\n" for line in lines))
    within = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts))
    try:
        subprocess.run([*within, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespace for an /etc/hosts of its own")
    return within


@scenario
async def test_of_a_name_with_two_addresses_the_broken_one_is_left_out_and_the_circuit_stays(
    tmp_path,
):
    """Half of the requests waited for it in vain, and five of those closed the upstream to all."""
    within = with_hosts(tmp_path, "127.0.0.1 two.test", "127.0.0.2 two.test")
    asked = []

    async def hung(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            asked.append(writer)
            await reader.read()
        writer.close()

    well = ScriptedUpstream("primary", chunk_gap_s=0.0)
    await well.start()
    port = httpx.URL(well.base_url).port
    async with await asyncio.start_server(hung, "127.0.0.2", port):
        urls = {"primary": f"http://two.test:{port}"}
        async with gateway(CONFIG, base_urls=urls, within=within) as gw:
            answers = [await gw.chat() for _ in range(30)]
            told = [answer.headers["x-pointsman-upstream"] for answer in answers]
            assert told.count("vllm-primary") == 27
            assert len(asked) == 3
            assert await gw.metric("pointsman_circuit_transitions_total") == 0
    await well.aclose()


@scenario
async def test_sidecar_that_ends_while_streams_are_watched_costs_none_of_them():
    """It was a timeout of each, on one upstream after the other; five of them ejected both."""
    watched = 'inference_timeout = "3s"\nfirst_token_timeout = "20s"\n'
    async with gateway(CONFIG, upstream_keys=dict.fromkeys(("primary", "fallback"), watched)) as gw:
        await gw.fault("primary", "slow_first_token", delay_s=1)
        streams = [asyncio.create_task(gw.chat(ask(stream=True))) for _ in range(8)]
        await until(lambda: len(gw.upstreams["primary"].seen) == 8)
        await asyncio.sleep(0.3)  # the headers are here
        gw.kill_sidecar()
        for response in await asyncio.gather(*streams):
            assert response.headers["x-pointsman-attempts"] == "vllm-primary:200"
            assert response.text.endswith("data: [DONE]\n\n")
        await gw.fault("primary", None)
        assert (await gw.chat()).headers["x-pointsman-attempts"] == "vllm-primary:200"


@scenario
async def test_silence_between_chunks_ends_a_stream_and_never_as_if_complete():
    async with gateway(
        POLICY + "[retry]\nmax_retries = 0\n" + ROUTES, server_keys='write_timeout = "1s"\n'
    ) as gw:
        await gw.fault("primary", "stall_stream")
        begun = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError):
            await gw.chat(ask(stream=True))
        assert time.monotonic() - begun < 4
        await gw.settled("pointsman_requests_total", 1, outcome="stream_cut")


@scenario
async def test_request_timeout_bounds_the_whole_exchange():
    async with gateway(CONFIG, server_keys='request_timeout = "1500ms"\n') as gw:
        gw.upstreams["primary"].chunk_gap_s = 0.7
        begun = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError):
            await gw.chat(ask(stream=True))
        assert 1.4 < time.monotonic() - begun < 3
        await gw.settled("pointsman_requests_total", 1, outcome="stream_cut")
