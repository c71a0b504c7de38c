"""axe finds nothing to object to, in each view, both themes, on a desktop and on a phone."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.support.server import RunningServer
from tests.ui.conftest import DESKTOP, PHONE, VIEWS, open_page

_RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


def findings(page) -> list[str]:
    violations = Axe().run(page, options=_RULES).response["violations"]
    return [f"{each['id']}: {each['help']} {_shown(each['nodes'])}" for each in violations]


def _shown(nodes) -> list[str]:
    return [node["html"][:160] + node["failureSummary"] for node in nodes[:3]]


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(open_view, view: str, viewport) -> None:
    page = open_view(view, viewport=viewport, reduced_motion="reduce")
    assert findings(page) == []
    page.click("#theme")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert findings(page) == []


def test_axe_finds_nothing_in_what_opens(open_view) -> None:
    page = open_view("search", reduced_motion="reduce")
    page.click("#drop-zone summary")
    assert findings(page) == []
    page.click("#to-text")
    page.click("text=Too long to be read")
    expect(page.locator(".cut-mark")).to_be_visible()
    page.click("text=more tokens")
    assert findings(page) == []


def test_axe_finds_nothing_in_the_question_for_a_token(browser, ui_server: RunningServer) -> None:
    with open_page(browser, ui_server.url) as page:
        page.evaluate("import('/ui/core/token.js').then((token) => { token.askForToken(true) })")
        expect(page.locator("#token-dialog")).to_be_visible()
        expect(page.locator("#token")).to_be_focused()
        assert findings(page) == []
        page.keyboard.press("Escape")
        expect(page.locator("#token-dialog")).to_be_hidden()
