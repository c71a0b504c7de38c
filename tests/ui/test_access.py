"""A server that asks for a token, one that goes away, and one below a path of a proxy."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.proxies import run_nginx
from tests.support.relay import Relay
from tests.support.server import RunningServer, run_server
from tests.ui.conftest import open_page, wait_for_view

pytestmark = pytest.mark.long

TOKEN = "the-right-token"
# As the guide says, nginx removes it.
PREFIX = "/embedder"
CHANGES = {
    "location / {": f"location {PREFIX}/ {{",
    "proxy_pass http://smart_embedder;": "proxy_pass http://smart_embedder/;",
    "proxy_http_version 1.1;": f"proxy_set_header X-Forwarded-Prefix {PREFIX};",
}


@pytest.fixture(scope="module")
def guarded(tiny_m3: Path, tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory):
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "DENSE_EMBEDDING_MODEL": str(tiny_qwen),
        "RERANKER_MODEL": "none",
        "API_TOKEN": TOKEN,
        "PROTECT_METRICS": "true",
    }
    with run_server(tmp_path_factory.mktemp("guarded"), **settings) as running:
        yield running


def enter(page, token: str) -> None:
    page.fill("#token", token)
    page.keyboard.press("Enter")


def test_a_token_is_asked_for_once_and_kept_in_the_tab(browser, guarded: RunningServer) -> None:
    with open_page(browser, guarded.url) as page:
        enter(page, TOKEN)
        wait_for_view(page, "text")
        page.click("text=Service")
        wait_for_view(page, "service")
        expect(page.locator("#totals")).to_contain_text("requests")
        page.reload()
        expect(page.locator("#totals")).to_contain_text("requests")
        expect(page.locator("#token-dialog")).to_be_hidden()
        assert page.evaluate("Object.values(localStorage)") == []
        assert page.evaluate("document.cookie") == ""
        other = page.context.new_page()
        other.goto(f"{guarded.url}/ui")
        expect(other.locator("#token-dialog")).to_be_visible()
        other.close()


def test_a_wrong_token_is_told_and_asked_for_again(browser, guarded: RunningServer) -> None:
    refused = "rejected_requests"
    with guarded.client(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        before = client.get("/stats").json()[refused]
        with open_page(browser, guarded.url) as page:
            expect(page.locator("#token-error")).to_have_text("")
            enter(page, "a wrong one")
            expect(page.locator("#token-error")).to_have_text(
                "The server does not accept this token."
            )
            enter(page, TOKEN)
            wait_for_view(page, "text")
        assert client.get("/stats").json()[refused] > before
    assert "wrong" not in guarded.log


def test_without_a_token_the_page_says_what_is_missing(browser, guarded: RunningServer) -> None:
    with open_page(browser, guarded.url, "service") as page:
        page.click("#token-cancel")
        expect(page.locator("#service-message")).to_have_text("A token is needed.")
        # What runs is public.
        wait_for_view(page, "service")
        page.click("#service-token")
        enter(page, TOKEN)
        expect(page.locator("#totals")).to_contain_text("requests")
        expect(page.locator("#service-message")).to_be_hidden()


def test_another_dense_model_and_no_reranker(browser, guarded: RunningServer) -> None:
    with open_page(browser, guarded.url, "search") as page:
        enter(page, TOKEN)
        wait_for_view(page, "search")
        expect(page.locator(".column.reranked")).to_contain_text("RERANKER_MODEL")
        for kind in ("dense", "colbert", "fused"):
            expect(page.locator(f".column.{kind} .hit")).to_have_count(10)
        page.click("#to-match")
        wait_for_view(page, "match")
        page.click("#to-service")
        expect(page.locator("#facts")).to_contain_text("tiny-qwen")
        assert page.locator("#models table").count() == 2


def test_the_page_goes_on_when_the_server_is_back(
    browser, ui_server: RunningServer, server: RunningServer
) -> None:
    """Another process answers at the same address, as after a restart."""
    with Relay() as address:
        address.connect_to(ui_server.url)
        page = browser.new_page()
        page.goto(f"{address.url}/ui#service")
        expect(page.locator("#totals")).to_contain_text("Up for")
        address.disconnect()
        expect(page.locator("#service-message")).to_contain_text("The server cannot be reached")
        expect(page.locator("#server-text")).to_contain_text("cannot be reached")
        page.click("#to-text")
        page.fill("#texts", "written while the server is away")
        expect(page.locator("#text-message")).to_have_text("The server does not answer.")
        address.connect_to(server.url)
        # By itself: nothing is clicked or typed.
        expect(page.locator("#server")).to_have_attribute("data-state", "healthy")
        expect(page.locator("#text-message")).to_be_hidden()
        expect(page.locator(".tokens")).to_have_text("written while the server is away")
        page.click("#to-service")
        expect(page.locator("#service-message")).to_be_hidden()
        expect(page.locator("#totals")).to_contain_text("Up for")
        page.close()
        address.disconnect()


@pytest.fixture(scope="module")
def below_a_path(ui_server: RunningServer, tmp_path_factory: pytest.TempPathFactory):
    upstream = ui_server.url.removeprefix("http://")
    with run_nginx(tmp_path_factory.mktemp("nginx"), upstream, CHANGES) as url:
        yield f"{url}{PREFIX}"


def test_below_a_path_nothing_outside_it_is_asked_for(browser, below_a_path: str) -> None:
    with open_page(browser, below_a_path, "search", ignore_https_errors=True) as page:
        wait_for_view(page, "search")
        page.goto(f"{below_a_path}/")
        expect(page).to_have_url(f"{below_a_path}/ui")
        page.goto(f"{below_a_path}/ui/")
        wait_for_view(page, "text")
        page.click(".foot a")
        expect(page).to_have_url(f"{below_a_path}/docs")
        page.click("text=Can this service answer?")
        page.click("text=Try it out")
        page.click("button.execute")
        expect(page.locator(".request-url").first).to_have_text(
            re.compile(f"{below_a_path}/health$")
        )
        expect(page.locator(".live-responses-table .response td").first).to_have_text("200")
