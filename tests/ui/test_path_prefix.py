"""The page and /docs below a path of a proxy, which nginx removes as the guide says."""

import re

import pytest
from playwright.sync_api import expect

from tests.support.nginx import run_nginx
from tests.support.server import RunningServer
from tests.ui.conftest import open_page, wait_for_view

PREFIX = "/embedder"
CHANGES = {
    "location / {": f"location {PREFIX}/ {{",
    "proxy_pass http://smart_embedder;": "proxy_pass http://smart_embedder/;",
    "proxy_http_version 1.1;": f"proxy_set_header X-Forwarded-Prefix {PREFIX};",
}


@pytest.fixture(scope="module")
def address(ui_server: RunningServer, tmp_path_factory: pytest.TempPathFactory):
    upstream = ui_server.url.removeprefix("http://")
    with run_nginx(tmp_path_factory.mktemp("nginx"), upstream, CHANGES) as url:
        yield f"{url}{PREFIX}"


def test_nothing_outside_the_path_is_asked_for(browser, address: str) -> None:
    with open_page(browser, address, "search", ignore_https_errors=True) as page:
        wait_for_view(page, "search")
        page.goto(f"{address}/")
        expect(page).to_have_url(f"{address}/ui")
        page.goto(f"{address}/ui/")
        wait_for_view(page, "text")
        page.click(".foot a")
        expect(page).to_have_url(f"{address}/docs")
        page.click("#operations-tag-operation button")
        page.click("text=Can this service answer?")
        page.click("text=Try it out")
        page.click("button.execute")
        expect(page.locator(".request-url").first).to_have_text(re.compile(f"{address}/health$"))
        expect(page.locator(".live-responses-table .response td").first).to_have_text("200")
