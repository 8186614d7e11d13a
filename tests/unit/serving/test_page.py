"""Who may ask for the status page, and that the page can do nothing but what it is for."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from extproc.serving import page

TEXT = Path(page.__file__).with_name("status.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:9464",
        "10.1.2.3",
        "[::1]:9464",
        "localhost:9464",
        "LOCALHOST",
        "pointsman:9464",
        "pointsman.team-a.svc:9464",
        "pointsman.localhost",
    ],
)
def test_names_that_are_the_users_own_are_answered(host: str) -> None:
    assert page.refusal(host, {}) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:9464",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example/127.0.0.1",
        "evil.example#.local",
        "evil.local",  # whoever answers first in this network
        "a@127.0.0.1",
        "[evil.example]",
        "2130706433",
        "",
    ],
)
def test_name_that_somebody_elses_dns_could_point_here_is_not(host: str) -> None:
    assert page.refusal(host, {}) == page._BAD_HOST


HOST = "127.0.0.1:9464"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin", "Origin": f"http://{HOST}"},
        {"Origin": f"https://{HOST}"},  # behind a proxy with TLS
    ],
)
def test_scripts_and_the_page_itself_may_ask(headers: dict[str, str]) -> None:
    assert page.refusal(HOST, headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this machine
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:8080"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_page_of_another_origin_may_not(headers: dict[str, str]) -> None:
    assert page.refusal(HOST, headers) == page._BAD_ORIGIN


def test_link_from_elsewhere_leads_to_the_page() -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert page.refusal(HOST, headers, navigation=True) is None
    assert page.refusal("evil.example", headers, navigation=True) == page._BAD_HOST


def test_policy_allows_the_pages_own_script_and_style_and_nothing_else() -> None:
    policy = page._headers(TEXT)["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    for element in ("script", "style"):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", TEXT, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{element}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in policy


def test_page_fetches_nothing_from_elsewhere_and_makes_no_markup_of_text() -> None:
    without_namespace = TEXT.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://", without_namespace) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", TEXT)
    assert not re.search(r"<[^>]+\s(?:on\w+|style|src)=", TEXT)
