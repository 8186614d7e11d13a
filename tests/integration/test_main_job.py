"""The way of a request through the real Envoy and a real sidecar: decided, rewritten, answered."""

import asyncio
import contextlib
import gzip
import json
from pathlib import Path

import httpx
import pytest
from gateway import CHAT, HOST, ask, gateway, scenario

pytestmark = pytest.mark.envoy

RAW = {"content-type": "application/json"}


@scenario
async def test_auto_takes_the_default_route_and_every_header_says_so():
    async with gateway() as gw:
        response = await gw.chat()
        assert response.status_code == 200
        assert response.headers["x-pointsman-route"] == "chat"
        assert response.headers["x-pointsman-reason"] == "default"
        assert response.headers["x-pointsman-upstream"] == "vllm-primary"
        assert response.headers["x-pointsman-model"] == "model-of-primary"
        assert response.headers["x-pointsman-attempts"] == "vllm-primary:200"
        assert "x-pointsman-fallback" not in response.headers
        assert response.headers["x-request-id"]
        assert response.json()["model"] == "model-of-primary"
        await gw.settled("pointsman_requests_total", 1, outcome="served")
        await gw.settled("pointsman_decisions_total", 1, route="chat", reason="default")


@scenario
async def test_keyword_explicit_and_unknown_models():
    async with gateway() as gw:
        keyword = await gw.chat(ask("这里有一个编译错误"))
        assert keyword.headers["x-pointsman-route"] == "code"
        assert keyword.headers["x-pointsman-reason"] == "keyword"
        assert keyword.headers["x-pointsman-upstream"] == "vllm-fallback"
        for model in ("fallback", "vllm-fallback", "model-of-fallback"):
            explicit = await gw.chat(ask(model=model))
            assert explicit.headers["x-pointsman-reason"] == "explicit"
            assert explicit.headers["x-pointsman-upstream"] == "vllm-fallback"
        named_route = await gw.chat(ask(model="code"))
        assert named_route.headers["x-pointsman-route"] == "code"
        unknown = await gw.chat(ask(model="gpt-9"))
        assert unknown.status_code == 404
        error = unknown.json()["error"]
        assert error["code"] == "model_not_found"
        assert "vllm-primary" in error["message"]


RULES = """
[router]
default = "chat"

[[route]]
name = "chat"
upstreams = ["primary", "fallback"]

[[route]]
name = "code"
upstreams = ["fallback", "primary"]
headers = { "X-Team" = "compilers", "x-beta" = "*" }
has = ["images", "tools"]
min_chars = 5000
keywords = ["traceback"]
patterns = ['(?i)^select\\b']
"""


@scenario
async def test_rules_decide_and_the_header_and_the_metric_name_them():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = {
        "header": [(ask(), {"X-TEAM": "compilers"}), (ask("traceback"), {"x-beta": "1"})],
        "content": [
            (ask(tools=[{"type": "function", "function": {"name": "f"}}]), {}),
            (ask([{"type": "text", "text": "what is it?"}, image]), {}),
        ],
        "length": [(ask("a" * 5000), {})],
        "keyword": [(ask("a Traceback"), {"x-team": "others"})],
        "pattern": [(ask("select 1"), {})],
        "default": [(ask("please select"), {"x-team": "others"}), (ask(tools=[]), {})],
    }
    async with gateway(RULES) as gw:
        for reason, requests in asked.items():
            route = "chat" if reason == "default" else "code"
            for body, headers in requests:
                answer = await gw.chat(body, headers=headers)
                assert answer.headers["x-pointsman-reason"] == reason
                assert answer.headers["x-pointsman-route"] == route
            await gw.settled("pointsman_decisions_total", len(requests), route=route, reason=reason)
        # What the client sends for a rule to read is the upstream's to read as well.
        assert gw.upstreams["fallback"].seen[0].headers["x-team"] == "compilers"
        explained = await gw.client.post(
            "/route", json={"prompt": "select 1"}, headers={"x-team": "compilers"}
        )
        assert explained.json()["matched"] == "x-team = compilers"
        matched = {each["signal"]: each["matched"] for each in explained.json()["signals"]}
        assert matched["pattern"] == r"(?i)^select\b"


@scenario
async def test_only_the_model_changes_in_the_body_an_upstream_gets():
    body = (
        b' {"id": 12345678901234567890123, "temperature":1.0,"temperature":0.50,\n "messages":'
        b'[{"role":"user","content":"\\"model\\":\\"auto\\" \\u4f60\\ud83d\\ude00 \xe4\xbd\xa0"}],'
        b'"tools":[{"model":"auto"}], "mod\\u0065l" : "auto" , "x":{"model":"auto"}} '
    )
    async with gateway() as gw:
        await gw.fault("primary", "5xx", times=2)
        response = await gw.client.post(CHAT, content=body, headers=RAW)
        assert response.status_code == 200
        first, retried = gw.upstreams["primary"].seen
        (second,) = gw.upstreams["fallback"].seen
        wanted = body.replace(b'l" : "auto"', b'l" : "model-of-primary"')
        assert first.body == retried.body == wanted
        assert second.body == wanted.replace(b"model-of-primary", b"model-of-fallback")
        assert int(second.headers["content-length"]) == len(second.body)


@scenario
async def test_five_megabytes_are_rewritten_and_retried_whole():
    big = ask("长" * 1_600_000 + "end")
    async with gateway() as gw:
        await gw.fault("primary", "5xx")
        response = await gw.chat(big)
        assert (
            response.headers["x-pointsman-attempts"]
            == "vllm-primary:retried,vllm-primary:5xx,vllm-fallback:200"
        )
        (seen,) = gw.upstreams["fallback"].seen
        assert json.loads(seen.body) == big | {"model": "model-of-fallback"}
        await gw.fault("fallback", "5xx")
        assert (await gw.chat(big)).headers["x-pointsman-upstream"] == "rule"


@scenario
async def test_each_attempt_carries_its_own_key_and_path_and_none_of_the_clients():
    keys = {
        "primary": 'api_key_env = "PRIMARY_KEY"\n',
        "fallback": 'api_key_env = "FALLBACK_KEY"\n',
    }
    client = {
        "authorization": "Bearer client-secret",
        "x-api-key": "client-secret",
        "cookie": "session=1",
        "x-pointsman-skip": ",primary,",
        "x-pointsman-chain": "upstream.fallback",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "x-request-id": "my-own-id",
    }
    async with gateway(upstream_keys=keys) as gw:
        await gw.fault("primary", "5xx")
        response = await gw.chat(headers=client)
        assert response.headers["x-request-id"] == "my-own-id"
        first = gw.upstreams["primary"].seen[0]
        (second,) = gw.upstreams["fallback"].seen
        assert first.headers["authorization"] == "Bearer sk-primary"
        assert second.headers["authorization"] == "Bearer sk-fallback"
        for seen in (first, second):
            assert "client-secret" not in str(dict(seen.headers))
            ours = {k.lower() for k in seen.headers if k.lower().startswith("x-")}
            assert ours == {"x-pointsman-model", "x-request-id"}
            assert "cookie" not in seen.headers
            assert seen.headers["traceparent"] == client["traceparent"]
            assert seen.headers["x-request-id"] == "my-own-id"
        assert first.headers["x-pointsman-model"] == "model-of-primary"
        assert second.headers["x-pointsman-model"] == "model-of-fallback"


@scenario
async def test_client_key_passes_where_the_upstream_has_none():
    async with gateway() as gw:
        await gw.chat(headers={"authorization": "Bearer mine"})
        assert gw.upstreams["primary"].seen[0].headers["authorization"] == "Bearer mine"


@scenario
async def test_path_is_joined_to_base_url_and_what_they_share_is_written_once():
    cases = {
        "plain": [("", "/v1/chat/completions", "/v1/chat/completions")],
        "api": [
            ("/api", "/v1/chat/completions", "/api/v1/chat/completions"),
            ("/api", "/api/v1/generate", "/api/v1/generate"),
        ],
        "openai": [
            ("/openai/v1", "/v1/chat/completions", "/openai/v1/chat/completions"),
            ("/openai/v1", "/openai/v1/chat/completions", "/openai/v1/chat/completions"),
            ("/openai/v1", "/v1/chat/completions?a=b", "/openai/v1/chat/completions?a=b"),
        ],
    }
    async with gateway(
        "", names=tuple(cases), base_paths={n: c[0][0] for n, c in cases.items()}
    ) as gw:
        for name, paths in cases.items():
            for _, asked, got in paths:
                await gw.chat(ask(model=name), path=asked)
                assert gw.upstreams[name].seen[-1].path == got


BAD_INPUT = [
    (b"nope", RAW, 400, "invalid_json"),
    (b"[1]", RAW, 400, "body_not_object"),
    (b"", RAW, 400, "empty_body"),
    (b'{"model":7}', RAW, 400, "invalid_model"),
    (b'{"model":"auto","model":"auto"}', RAW, 400, "duplicate_model"),
    (b'{"model":"auto","messages":{}}', RAW, 400, "invalid_messages"),
    (b'{"model":"auto","messages":["x"]}', RAW, 400, "invalid_messages"),
    (b'{"model":"auto"', RAW, 400, "invalid_json"),
    (b"{" * 100_000, RAW, 400, "invalid_json"),
    (b"hello", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    (b"x", RAW | {"content-encoding": "br"}, 415, "unsupported_content_encoding"),
    (b"x" * (10 * 1024 * 1024 + 1), RAW, 413, "request_too_large"),
]


@scenario
async def test_bad_input_gets_an_openai_shaped_4xx_and_reaches_no_upstream():
    async with gateway() as gw:
        for content, headers, status, code in BAD_INPUT:
            response = await gw.client.post(CHAT, content=content, headers=headers)
            assert response.status_code == status, code
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.json()["error"]["code"] == code
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-pointsman-reason"] == "local"
        assert not any(upstream.seen for upstream in gw.upstreams.values())
        await gw.settled("pointsman_requests_total", len(BAD_INPUT), outcome="rejected")


async def _in_pieces(raw: bytes):
    yield raw[:9]
    yield raw[9:]


@scenario
async def test_however_a_body_is_framed_it_is_decided_alike_and_arrives_with_its_length():
    raw = json.dumps(ask("a compile error 编译错误")).encode()
    packed = gzip.compress(raw)
    zipped = RAW | {"content-encoding": "gzip"}
    async with gateway() as gw, httpx.AsyncClient(http1=False, http2=True) as h2:
        url = f"http://{HOST}:{gw.listen}{CHAT}"
        asked = [
            gw.client.post(CHAT, content=raw, headers=RAW),
            gw.client.post(CHAT, content=packed, headers=zipped),
            gw.client.post(CHAT, content=_in_pieces(raw), headers=RAW),
            gw.client.post(CHAT, content=_in_pieces(packed), headers=zipped),
            h2.post(url, content=raw, headers=RAW),
            h2.post(url, content=_in_pieces(raw), headers=RAW),
        ]
        for asking in asked:
            answer = await asking
            assert answer.status_code == 200
            assert answer.headers["x-pointsman-route"] == "code"
            assert answer.headers["x-pointsman-reason"] == "keyword"
        bodies = {seen.body for seen in gw.upstreams["fallback"].seen}
        assert bodies == {raw.replace(b'"auto"', b'"model-of-fallback"')}
        for seen in gw.upstreams["fallback"].seen:
            assert seen.headers["content-length"] == str(len(seen.body))
        await gw.settled("pointsman_decisions_total", len(asked), route="code", reason="keyword")


@scenario
async def test_no_prompt_passes_the_sidecar_or_the_account_by_because_of_bytes_in_its_headers():
    odd = [
        b"x-request-id: \xff\xfe",
        b"content-type: application/json; \xff",
        "content-type: application/json; charset=ü".encode(),
        b"content-type: application/json\r\ncontent-type: application/json",
        b"content-encoding: identity\r\ncontent-encoding: identity",
        b"content-encoding: \xff",
    ]
    raw = json.dumps(ask()).encode()
    async with gateway() as gw:
        for lines in odd:
            plain = b"" if b"content-type" in lines else b"\r\ncontent-type: application/json"
            reader, writer = await asyncio.open_connection(HOST, gw.listen)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-length: %d\r\n%b%b\r\n\r\n%b" % (len(raw), lines, plain, raw)
            )
            answer = await reader.read()
            writer.close()
            assert b"degraded" not in answer, lines
        await gw.settled("pointsman_requests_total", len(odd))
        assert await gw.metric("pointsman_internal_errors_total") == 0


@scenario
async def test_gzip_bodies_are_unpacked_and_the_upstream_gets_plain_json():
    async with gateway() as gw:
        packed = gzip.compress(json.dumps(ask()).encode())
        response = await gw.client.post(
            CHAT, content=packed, headers=RAW | {"content-encoding": "gzip"}
        )
        assert response.status_code == 200
        (seen,) = gw.upstreams["primary"].seen
        assert json.loads(seen.body)["model"] == "model-of-primary"
        assert "content-encoding" not in seen.headers


@scenario
async def test_gets_and_other_paths_pass_to_the_default_chain():
    async with gateway() as gw:
        health = await gw.client.get("/health")
        assert health.status_code == 200
        assert health.headers["x-pointsman-upstream"] == "vllm-primary"
        upload = await gw.client.post("/v1/files", files={"file": b"model: auto"})
        assert upload.headers["x-pointsman-upstream"] == "vllm-primary"
        odd = await gw.client.post("/tokenize", content=b"[1, 2", headers=RAW)
        assert odd.headers["x-pointsman-reason"] == "degraded_body"
        assert gw.upstreams["primary"].seen[-1].body == b"[1, 2"
        named = await gw.client.post("/tokenize", json={"model": "auto", "text": "x"})
        assert named.headers["x-pointsman-model"] == "model-of-primary"
        assert json.loads(gw.upstreams["primary"].seen[-1].body)["model"] == "model-of-primary"


@scenario
async def test_models_and_route_are_answered_without_an_upstream():
    async with gateway() as gw:
        models = (await gw.client.get("/v1/models")).json()
        ids = [entry["id"] for entry in models["data"]]
        assert ids[0] == "auto"
        assert {"chat", "code", "primary", "vllm-primary", "model-of-fallback"} <= set(ids)
        assert (await gw.client.get("/v1/models/code")).json()["id"] == "code"
        assert (await gw.client.get("/v1/models/nope")).status_code == 404
        explained = await gw.client.post("/route", json={"prompt": "Traceback (most recent)"})
        assert explained.json()["route"] == "code"
        assert explained.json()["matched"] == "Traceback"
        assert (await gw.client.get("/route")).status_code == 405
        assert not any(upstream.seen for upstream in gw.upstreams.values())


@scenario
async def test_own_listener_answers_health_readiness_and_metrics():
    async with gateway() as gw:
        for path in ("/healthz", "/readyz"):
            assert (await gw.client.get(gw.metrics_url(path))).status_code == 200
        metrics = (await gw.client.get(gw.metrics_url("/metrics"))).text
        assert "# HELP pointsman_requests_total" in metrics
        assert 'pointsman_circuit_state{upstream="vllm-primary"} 0.0' in metrics


@pytest.mark.parametrize("http2", [False, True])
@scenario
async def test_streams_arrive_piece_by_piece_over_http1_and_http2(http2):
    async with (
        gateway() as gw,
        httpx.AsyncClient(base_url=gw.client.base_url, http1=not http2, http2=http2) as client,
    ):
        gw.upstreams["primary"].chunk_gap_s = 0.05
        async with client.stream("POST", CHAT, json=ask(stream=True)) as response:
            assert response.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            assert response.headers["content-type"].startswith("text/event-stream")
            pieces = [piece async for piece in response.aiter_raw()]
        assert len(pieces) > 3
        assert pieces[-1].endswith(b"data: [DONE]\n\n")


@scenario
async def test_article_config_runs_as_it_stands_but_for_where_its_upstreams_are():
    article = (Path(__file__).parents[1] / "data" / "config" / "article.toml").read_text()
    async with gateway("", names=("primary", "fallback")) as gw:
        for upstream in gw.upstreams.values():
            article = article.replace("https://llm.example/api", f"{upstream.base_url}/api", 1)
        article = article.replace('"0.0.0.0:8080"', f'"127.0.0.1:{gw.listen}"')
        own = f"""
[admin]
listen = "127.0.0.1:{gw.admin}"
[metrics]
listen = "127.0.0.1:{gw.metrics_port}"
[extproc]
socket = "{gw.socket_path}"
"""
        gw.config_path.write_text(article + own)
        gw.extra_environ = {"PRIMARY_API_KEY": "sk-1", "FALLBACK_API_KEY": "sk-2"}
        await gw.restart()
        prompt = {"prompt": "hello", "max_tokens": 5}
        response = await gw.chat(prompt, path="/api/v1/generate")
        assert response.status_code == 200
        seen = gw.upstreams["primary"].seen[-1]
        assert seen.path == "/api/v1/generate"
        assert json.loads(seen.body) == prompt | {"model": "your-primary-model"}
        assert seen.headers["authorization"] == "Bearer sk-1"
        await gw.fault("primary", "5xx")
        response = await gw.chat(prompt, path="/api/v1/generate")
        assert response.headers["x-pointsman-upstream"] == "vllm-fallback"
        await gw.fault("fallback", "refused")
        response = await gw.chat(prompt, path="/api/v1/generate")
        assert response.headers["x-pointsman-upstream"] == "rule"
        assert response.json()["choices"][0]["text"].startswith("The service is busy")


@scenario
async def test_broken_http_is_told_in_openai_shape_too():
    post = b"POST /v1/chat/completions HTTP/1.%d\r\nhost: x\r\n"
    sent = [
        (400, b"GET / HTTP/1.1\r\n\r\n"),
        (400, b"BLAH\r\n\r\n"),
        (400, post % 1 + b"transfer-encoding: chunked\r\n\r\nZZ\r\n"),
        (426, post % 0 + b"content-length: 2\r\n\r\n{}"),
        (501, post % 1 + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        (403, post % 1 + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"),
    ]
    async with gateway() as gw:
        for status, request in sent:
            reader, writer = await asyncio.open_connection(HOST, gw.listen)
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 %d" % status)
            assert json.loads(body)["error"]["code"] == "bad_request"
            assert b"x-pointsman-reason: local" in head


@scenario
async def test_body_over_the_limit_is_refused_over_http2_too() -> None:
    """Envoy buffers as much as the stream's window lets in, whatever the limit; by default 16 MiB."""
    limit = 'max_body = "64KiB"\n'
    sizes = (70_000, 300_000, 1_300_000, 12_000_000)
    async with gateway(server_keys=limit) as running:
        url = f"http://{HOST}:{running.listen}"
        for size in sizes:
            async with httpx.AsyncClient(base_url=url, http1=False, http2=True) as client:
                # The refusal comes before the body is sent, and a client may see the stream's end first.
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.post(CHAT, json=ask("x" * size), timeout=30)
                    assert answer.status_code == 413
        await running.settled("pointsman_requests_total", len(sizes), outcome="rejected")
        assert not running.upstreams["primary"].seen
        async with httpx.AsyncClient(base_url=url, http1=False, http2=True) as client:
            assert (await client.post(CHAT, json=ask("x" * 60_000))).status_code == 200


@scenario
async def test_body_of_the_largest_size_may_grow_by_the_name_of_its_model() -> None:
    most = 2 * 1024 * 1024
    named, unnamed = json.dumps(ask()), json.dumps({"messages": ask()["messages"]})
    async with gateway(server_keys='max_body = "2MiB"\n') as running:
        for raw in (named, unnamed):
            for size, status in ((most, 200), (most + 1, 413)):
                answer = await running.client.post(CHAT, content=raw.ljust(size), headers=RAW)
                assert answer.status_code == status
        assert all(len(each.body) > most for each in running.upstreams["primary"].seen)
        for upstream in ("primary", "fallback"):
            await running.fault(upstream, "5xx")
        answer = await running.client.post(CHAT, content=named.ljust(most), headers=RAW)
        assert answer.headers["x-pointsman-upstream"] == "rule"


@scenario
async def test_admin_interface_shows_and_drains_but_cannot_be_told_to_quit() -> None:
    """Any web page can have a browser on the machine post there."""
    async with gateway() as running:
        admin = f"http://{HOST}:{running.admin}"
        for path in ("/quitquitquit", "/healthcheck/fail", "/logging?level=trace", "/"):
            assert (await running.client.post(admin + path)).status_code == 403
        for path in ("/stats?filter=uptime", "/clusters", "/ready", "/stats/prometheus"):
            assert (await running.client.get(admin + path)).status_code == 200
        assert (await running.chat()).status_code == 200
