"""axe finds nothing to object to, in each view, both themes, on a desktop and on a phone."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.support.server import RunningServer
from tests.ui.conftest import PHONE, STILL, VIEWS, open_page

pytestmark = pytest.mark.long

# All nodes are checked; of those that pass only one is described for each rule.
_RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "resultTypes": ["violations"],
}


def findings(page, context=None) -> list[str]:
    violations = Axe().run(page, context=context, options=_RULES).response["violations"]
    return [f"{each['id']}: {each['help']} {_shown(each['nodes'])}" for each in violations]


def _shown(nodes) -> list[str]:
    return [node["html"][:160] + node["failureSummary"] for node in nodes[:3]]


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(open_view, view: str) -> None:
    page = open_view(view, media=STILL)
    for button in page.locator(f"#{view}-view summary").all():
        button.click()
    assert findings(page) == []
    page.click("#theme")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert findings(page) == []
    page.set_viewport_size(PHONE)
    assert findings(page) == []


def test_axe_finds_nothing_where_a_text_is_cut(open_view) -> None:
    page = open_view("text", media=STILL)
    page.click("text=Too long to be read")
    expect(page.locator(".cut-mark")).to_be_visible()
    # There are hundreds of tokens, each of which takes axe as long as all else.
    assert findings(page, {"include": [[".cut-mark"], [".token.cut:last-child"]]}) == []


def test_axe_finds_nothing_in_the_question_for_a_token(browser, ui_server: RunningServer) -> None:
    with open_page(browser, ui_server.url) as page:
        page.evaluate("import('/ui/core/token.js').then((token) => { token.askForToken(true) })")
        expect(page.locator("#token-dialog")).to_be_visible()
        expect(page.locator("#token")).to_be_focused()
        assert findings(page) == []
        page.keyboard.press("Escape")
        expect(page.locator("#token-dialog")).to_be_hidden()
