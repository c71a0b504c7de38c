"""Service: charts of what is polled, a restart of the server, and a token behind a proxy."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.app.ui.conftest import findings, open_page, wait_for_view
from tests.support.proxies import run_nginx
from tests.support.relay import Relay
from tests.support.server import RunningServer, run_server

pytestmark = pytest.mark.long

TOKEN = "the-right-token"
# As the guide says, nginx removes it.
PREFIX = "/embedder"
CHANGES = {
    "location / {": f"location {PREFIX}/ {{",
    "proxy_pass http://smart_embedder;": "proxy_pass http://smart_embedder/;",
    "proxy_http_version 1.1;": f"proxy_set_header X-Forwarded-Prefix {PREFIX};",
}
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def read_the_chart_of_memory(page) -> None:
    """By pointer and by keys: the scale, the times and the points."""
    chart = page.locator("#chart-memory")
    drawing, note = chart.locator("svg"), chart.locator(".figure-note")
    three = re.compile(r"^\S+ \S+ \S+")
    expect(chart.locator("polyline")).to_have_attribute("points", three)
    scale = ["0", r"[\d.]+ [MG]B", r"[\d.]+ [MG]B", ""]
    marks = [re.compile(f"^{text}$") for text in scale + [r"\d\d:\d\d:\d\d"] * 3]
    expect(chart.locator("text")).to_have_text(marks)
    expect(page.locator("#chart-queue text").nth(3)).to_have_text("requests")
    first, _, last = chart.locator("text").all_text_contents()[4:]
    assert page.locator("#charts-since").text_content().startswith(f"Since {first}, ")
    size = drawing.bounding_box()
    drawing.hover(position={"x": size["width"] - 10, "y": 60})
    expect(chart.locator(".mark")).to_have_count(1)
    expect(note).to_have_text(re.compile(r"^\d\d:\d\d:\d\d: [\d.]+ [MG]B$"))
    assert note.text_content().split(": ")[0] >= last
    page.mouse.move(0, 0)
    expect(note).to_have_text("no GPU in use")
    drawing.press("Home")
    expect(note).to_contain_text(f"{first}: ")
    drawing.press("ArrowRight")
    expect(note).not_to_contain_text(f"{first}: ")
    expect(drawing).to_have_attribute("aria-valuenow", "1")
    expect(drawing).to_have_attribute("aria-valuetext", note.text_content())
    drawing.blur()
    expect(note).to_have_text("no GPU in use")


def test_charts_draw_what_is_polled_and_go_on_after_a_restart(
    browser, ui_server: RunningServer
) -> None:
    """The figures of another process are in test_logic.py."""
    with Relay() as address:
        address.connect_to(ui_server.url)
        with open_page(browser, address.url, "ui#service") as page:
            expect(page.locator("#service-state")).to_have_text("healthy")
            expect(page.locator("#facts")).to_contain_text("512 tokens")
            expect(page.locator("#models")).to_contain_text("attention")
            assert page.locator(".chart").count() == 8
            tokens = page.locator("#chart-tokens .figure-note")
            expect(tokens).to_contain_text(re.compile(r"\d"))  # The first figures take a moment.
            before = tokens.inner_text()
            with ui_server.client() as client:
                client.post("/embeddings", json={"sentences": ["a b c"]})
            expect(tokens).not_to_have_text(before)
            expect(page.locator("#chart-latency svg")).to_have_attribute(
                "aria-label", re.compile(r"highest [\d.,]+ m?s")
            )

            read_the_chart_of_memory(page)

            address.disconnect()
            expect(page.locator("#service-message")).to_contain_text("The server cannot be reached")
            page.click("#to-text")
            page.fill("#texts", "written while the server is away")
            expect(page.locator("#text-message")).to_have_text("The server does not answer.")
            address.connect_to(ui_server.url)
            # By itself: nothing is clicked or typed.
            expect(page.locator("#server")).to_have_attribute("data-state", "healthy")
            expect(page.locator("#text-message")).to_be_hidden()
            expect(page.locator(".tokens")).to_have_text("written while the server is away")
            page.click("#to-service")
            expect(page.locator("#service-message")).to_be_hidden()
            expect(page.locator("#totals")).to_contain_text("Up for")

            # With a clock that stands still, nothing is drawn before there are two points.
            page.clock.install()
            page.reload()
            wait_for_view(page, "service")
            expect(page.locator("#totals")).to_contain_text("requests")
            expect(page.locator(".figure-number")).to_have_text(["…"] * 8)
            with page.expect_response("**/metrics"):
                page.clock.run_for(4000)
            expect(page.locator("#chart-queue .figure-number")).to_have_text("0")
            assert page.locator(".chart svg > *").count() == 0
            since = page.locator("#charts-since")
            expect(since).to_have_text("The charts begin in a few seconds.")
            with page.expect_response("**/metrics"):
                page.clock.run_for(4000)
            expect(page.locator("#chart-queue polyline")).to_have_count(1)
            # Nor is anything polled while the tab is hidden.
            page.wait_for_load_state("networkidle")
            page.evaluate(HIDE, True)
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.clock.run_for(60_000)
            while_hidden = list(asked)
            with page.expect_request("**/metrics"):
                page.evaluate(HIDE, False)
            assert while_hidden == []
        address.disconnect()


@pytest.fixture
def below_a_path(tiny_m3: Path, tiny_qwen: Path, tmp_path: Path):
    """A server that asks for a token, has another dense model and no reranker, behind nginx."""
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "DENSE_EMBEDDING_MODEL": str(tiny_qwen),
        "RERANKER_MODEL": "none",
        "API_TOKEN": TOKEN,
        "PROTECT_METRICS": "true",
        "TRUSTED_PROXIES": "127.0.0.1",
    }
    with run_server(tmp_path, **settings) as running:
        proxy = tmp_path / "nginx"
        proxy.mkdir()
        with run_nginx(proxy, running.url.removeprefix("http://"), CHANGES) as url:
            yield f"{url}{PREFIX}", running


def enter(page, token: str) -> None:
    page.fill("#token", token)
    page.keyboard.press("Enter")


def test_a_token_is_asked_for_once_kept_in_the_tab_and_sent_nowhere_else(
    browser, below_a_path: tuple[str, RunningServer]
) -> None:
    url, guarded = below_a_path
    with open_page(browser, url, "ui#service", ignore_https_errors=True) as page:
        expect(page.locator("#token")).to_be_focused()
        assert findings(page) == []
        page.keyboard.press("Escape")
        expect(page.locator("#token-dialog")).to_be_hidden()
        expect(page.locator("#service-message")).to_have_text("A token is needed.")
        wait_for_view(page, "service")  # What runs is public.
        expect(page.locator("#facts")).to_contain_text("tiny-qwen")
        page.click("#service-token")
        expect(page.locator("#token-error")).to_have_text("")
        enter(page, "a wrong one")
        expect(page.locator("#token-error")).to_have_text("The server does not accept this token.")
        enter(page, TOKEN)
        expect(page.locator("#totals")).to_contain_text("requests")
        expect(page.locator("#service-message")).to_be_hidden()
        assert "wrong" not in guarded.log
        page.reload()
        expect(page.locator("#totals")).to_contain_text("requests")
        expect(page.locator("#token-dialog")).to_be_hidden()
        assert page.evaluate("Object.values(localStorage)") == []
        assert page.evaluate("document.cookie") == ""

        page.click("#to-search")
        wait_for_view(page, "search")
        expect(page.locator(".column.reranked")).to_contain_text("RERANKER_MODEL")
        for kind in ("dense", "colbert", "fused"):
            expect(page.locator(f".column.{kind} .hit")).to_have_count(10)

        # Nothing outside the path is asked for, also from the documentation.
        page.goto(f"{url}/")
        expect(page).to_have_url(f"{url}/ui")
        page.goto(f"{url}/ui/")
        wait_for_view(page, "text")
        page.click(".foot a")
        expect(page).to_have_url(f"{url}/docs")
        page.click("text=Can this service answer?")
        page.click("text=Try it out")
        page.click("button.execute")
        expect(page.locator(".request-url").first).to_have_text(re.compile(f"{url}/health$"))
        expect(page.locator(".live-responses-table .response td").first).to_have_text("200")
        other = page.context.new_page()
        other.goto(f"{url}/ui")
        expect(other.locator("#token-dialog")).to_be_visible()
