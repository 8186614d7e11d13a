"""The status page in a real browser, during a fault: what a person would see, light, dark and on a phone."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gateway import Gateway, ask, gateway, scenario
from playwright.async_api import Browser, Page, Route, async_playwright, expect

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]

CONFIG = """
[router]
default = "chat"
deadline = "5s"

[circuit_breaker]
failure_threshold = 2
cooldown = "60s"

[[route]]
name = "chat"
upstreams = ["primary", "fallback"]
utterances = ["tell me a joke", "what should I cook tonight", "hello, how are you"]

[[route]]
name = "code"
upstreams = ["fallback", "primary"]
keywords = ["traceback"]
utterances = ["write a python function", "fix this compiler error", "undo my last git commit"]
"""
PHONE = {"width": 375, "height": 812}
DESKTOP = {"width": 1280, "height": 900}
PATIENCE_MS = 15_000


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Without a sandbox, because CI runs as root; the page is ours.
        running = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield running
        finally:
            await running.close()


@contextlib.asynccontextmanager
async def visit(chromium: Browser, running: Gateway, **look: object) -> AsyncIterator[Page]:
    """The page once it shows something; nothing may go wrong on it, or leave this machine."""
    context = await chromium.new_context(**{"viewport": DESKTOP, **look})
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    faults: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda said: faults.append(said.text) if "Content Security" in said.text else None,
    )
    page.on("request", lambda request: asked.add(request.url.partition("?")[0]))
    await page.goto(running.metrics_url("/"))
    await expect(page.get_by_role("main")).to_be_visible(timeout=PATIENCE_MS)
    yield page
    assert faults == []
    home = running.metrics_url("/")
    assert {url for url in asked if not url.startswith((home, "data:"))} == set()
    await context.close()


def circuit(page: Page, upstream: str):
    return (
        page.get_by_role("region", name="Circuits")
        .get_by_role("listitem")
        .filter(has_text=upstream)
    )


async def seconds_left(page: Page) -> int:
    text = await circuit(page, "vllm-primary").inner_text()
    found = re.search(r"half-open in\s+(\d+) s", text)
    assert found, text
    return int(found[1])


async def decide(page: Page) -> None:
    """Press the button; once more where that came sooner after another try than the page may ask."""
    status = 429
    while status == 429:
        async with page.expect_response("**/route") as answered:
            await page.get_by_role("button", name="Decide").click()
        status = (await answered.value).status


async def break_primary(running: Gateway) -> None:
    await running.fault("primary", "hang")
    for _ in range(2):
        await running.chat()
    await running.settled("pointsman_circuit_state", 2, upstream="vllm-primary")
    await running.chat(headers={"x-request-id": "<b>skipped</b>"})
    await running.settled("model_fallback_total", 1, reason="circuit_open")


async def crowd(page: Page) -> None:
    """The page over a document such as a large gateway in trouble would give."""

    async def more(route: Route) -> None:
        response = await route.fetch()
        found = await response.json()
        reasons = (
            "semantic",
            "degraded_fast",
            "degraded_queue_full",
            "degraded_bypassed",
            "default",
        )
        for each in found["routes"]:
            each["total"] = 10**9
            each["reasons"] = {reason: {"recent": 12_345_678, "total": 10**9} for reason in reasons}
        for each in found["upstreams"]:
            each["answered"] = {"recent": 12_345_678, "total": 10**9}
            each["model"] = "a-provider/a-model-with-a-long-name-and-no-place-to-break-it-70b"
        for each in found["last_requests"]:
            each["attempts"] = (
                "vllm-primary:circuit_open,vllm-fallback:retried,vllm-fallback:5xx,rule:200"
            )
        await route.fulfill(json=found)

    await page.route("**/status.json", more)
    await expect(page.get_by_role("region", name="Routes")).to_contain_text("degraded bypassed")


async def too_wide(page: Page) -> list[str]:
    """The tables that are wider than their panel, and the page, if it would scroll sideways."""
    return await page.evaluate("""() => {
        const right = each => each.getBoundingClientRect().right;
        const wide = [...document.querySelectorAll("table")].filter(
            each => right(each) > right(each.parentElement) + 1
        ).map(each => each.parentElement.id);
        return document.documentElement.scrollWidth > innerWidth ? [...wide, "page"] : wide;
    }""")


@scenario
async def test_a_person_sees_the_fault_its_countdown_its_reason_and_tries_a_prompt(
    tmp_path: Path,
) -> None:
    async with gateway(CONFIG) as running, browser() as chromium:
        await running.chat(ask("hello, how are you?"))
        async with visit(chromium, running) as page:
            await expect(page.locator("#state")).to_have_text("All clear")
            await expect(circuit(page, "vllm-primary")).to_contain_text("Closed")

            await break_primary(running)
            alert = page.get_by_role("list", name="Alerts").get_by_role("listitem")
            await expect(alert).to_contain_text("The circuit of vllm-primary is open")
            await expect(alert).to_contain_text("Route chat goes to vllm-fallback.")
            await expect(page.locator("#state")).to_have_text("Degraded")
            await expect(page).to_have_title("Degraded · Pointsman")
            await expect(page.get_by_role("status")).to_contain_text("vllm-primary is open")
            await expect(circuit(page, "vllm-primary")).to_contain_text("Open")
            first = await seconds_left(page)
            await page.wait_for_function(
                "first => Number(document.querySelector('[data-left]').textContent.split(' ')[0]) < first",
                arg=first,
            )
            assert 0 < await seconds_left(page) < first <= 60
            fallbacks = page.get_by_role("region", name="Fallbacks")
            for reason in ("timeout", "circuit_open"):
                row = fallbacks.get_by_role("row").filter(has_text=reason)
                await expect(row).to_contain_text("vllm-primary → vllm-fallback")
            outcomes = page.get_by_role("region", name="Outcomes")
            await expect(
                outcomes.get_by_role("row").filter(has_text="by fallback")
            ).to_contain_text("3")
            account = page.get_by_role("region", name="The account")
            await expect(account).to_contain_text(
                re.compile(r"Every request is accounted for.*ended\s*4.*Difference\s*0"),
                timeout=PATIENCE_MS,
            )
            # What a client sent is text, never markup.
            await expect(page.get_by_role("region", name="Last requests").first).to_contain_text(
                "<b>skipped</b>"
            )

            await page.get_by_label("Prompt").fill("write a python function that sorts a list")
            await page.get_by_label("Prompt").press("Control+Enter")
            answer = page.locator("#answer")
            await expect(answer).to_contain_text("Route code: its score is the best")
            code, chat = (answer.locator(f"[data-score={route}]") for route in ("code", "chat"))
            await expect(code).to_contain_text("won, threshold 0.28")
            await expect(chat).to_contain_text("below 0.28")
            bars = [
                await each.locator("i").evaluate("bar => bar.getBoundingClientRect().width")
                for each in (code, chat)
            ]
            assert bars[0] > bars[1] > 0
            mark = await code.locator("s").evaluate("mark => mark.getBoundingClientRect().x")
            end = await code.locator("i").evaluate("bar => bar.getBoundingClientRect().right")
            assert mark < end

            await page.get_by_label("Prompt").fill("tell me why this traceback")
            await decide(page)
            await expect(answer).to_contain_text("a keyword rule matched “traceback”")
            await expect(answer.get_by_role("list", name="Rules")).to_contain_text("which decided")
            await expect(answer).to_contain_text("a rule decided first")
            await page.get_by_label("Prompt").fill("tell me a joke")
            await decide(page)
            await expect(answer).to_contain_text("open, skipped")
            await page.screenshot(path=tmp_path / "light.png", full_page=True)

            await page.get_by_role("button", name="Theme: auto").click()
            await page.get_by_role("button", name="Theme: light").click()
            scheme = "getComputedStyle(document.documentElement).colorScheme"
            assert await page.evaluate(scheme) == "dark"

        for name, look in {
            "dark": {"color_scheme": "dark"},
            "phone": {"viewport": PHONE, "has_touch": True},
            "phone-dark": {"viewport": PHONE, "color_scheme": "dark", "reduced_motion": "reduce"},
        }.items():
            async with visit(chromium, running, **look) as page:
                await expect(circuit(page, "vllm-primary")).to_contain_text("Open")
                assert await too_wide(page) == []
                await crowd(page)
                assert await too_wide(page) == []
                await page.screenshot(path=tmp_path / f"{name}-crowd.png", full_page=True)
                await page.unroute_all(behavior="ignoreErrors")
                await page.screenshot(path=tmp_path / f"{name}.png", full_page=True)


@scenario
async def test_quiet_page_says_how_to_send_traffic_and_a_lost_sidecar_since_when(
    tmp_path: Path,
) -> None:
    async with gateway(CONFIG) as running, browser() as chromium, visit(chromium, running) as page:
        last = page.get_by_role("region", name="Last requests").first
        await expect(last).to_contain_text(f"curl -si http://127.0.0.1:{running.listen}/v1/chat")
        await expect(page.get_by_role("region", name="Fallbacks")).to_contain_text("None")
        await expect(page.get_by_role("img", name="No decision yet")).to_be_visible()
        await expect(page.get_by_role("list", name="Alerts")).to_be_hidden()

        running.kill_sidecar()
        alert = page.get_by_role("list", name="Alerts")
        await expect(alert).to_contain_text(
            re.compile(r"has not answered since \d\d:\d\d:\d\d, \d+ s ago")
        )
        await expect(page.locator("#state")).to_have_text("Not answering")
        await page.get_by_label("Prompt").fill("hello")
        await page.get_by_role("button", name="Decide").click()
        await expect(page.locator("#answer")).to_contain_text("The sidecar does not answer.")
        await page.screenshot(path=tmp_path / "lost.png", full_page=True)
        await running.start_sidecar()
        await expect(page.locator("#state")).not_to_have_text("Not answering", timeout=PATIENCE_MS)
        await expect(page.locator("main.stale")).to_have_count(0)
