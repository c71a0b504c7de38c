"""Every view and the API's documentation by light, in the dark, on a phone, and without a mouse.

`WRITE_PICTURES=1 python -m pytest tests/app/ui/test_look.py` makes the pictures of the docs anew.
Fonts differ between machines, so only a picture's size and the lightness of large areas are
compared.
"""

import base64
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.app.ui.conftest import DESKTOP, PHONE, SHOWN, findings, open_page, wait_for_view
from tests.support.server import REPOSITORY, RunningServer

pytestmark = pytest.mark.long

DOCS = REPOSITORY / "docs"
MOST_BYTES = 300_000
# The mean difference of two areas of the picture, from 0 (the same) to 1 (black and white).
TOLERANCE = 0.06
WRITES = bool(os.environ.get("WRITE_PICTURES"))
STEPS = 24 if WRITES else 1
WINDOW = {"width": 1280, "height": 800}
PICTURES = {
    "ui-text.png": ("text", "light", WINDOW),
    "ui-match.png": ("match", "dark", {"width": 1280, "height": 930}),
    "ui-search.png": ("search", "light", {"width": 1280, "height": 990}),
    "ui-service.png": ("service", "light", WINDOW),
    "ui-phone.png": ("match", "light", PHONE),
}
# The mean lightness of each of 24 by 16 areas, and the size.
AREAS = """async (encoded) => {
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes]));
  const context = new OffscreenCanvas(24, 16).getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, 24, 16);
  const { data } = context.getImageData(0, 0, 24, 16);
  const lightness = (i) => (data[4 * i] + data[4 * i + 1] + data[4 * i + 2]) / 765;
  const areas = Array.from({ length: 24 * 16 }, (_, i) => lightness(i));
  return { size: [picture.width, picture.height], areas };
}"""
PAPER = "getComputedStyle(document.body).backgroundColor"
SECONDS = "all => all.map((node) => parseFloat(getComputedStyle(node).transitionDuration))"
OURS = ["embeddings", "rerank", "extract", "operation"]
# Of an operation. With a response for each status it has three times as many.
MOST_PIXELS = 2200
# About three words.
LEAST_WIDTH = 150


def work_for(server: RunningServer, page) -> None:
    """Requests between the points of the charts, of a minute where a picture is made."""
    with server.client() as client:
        for step in range(STEPS):
            texts = ["How full is a batch, and how long does a request take?"] * (1 + step * 7 % 11)
            client.post("/embeddings", json={"sentences": texts, "return_colbert": False})
            page.wait_for_event("response", lambda answer: answer.url.endswith("/metrics"))


def areas_of(page, png: bytes) -> dict[str, list[float]]:
    areas: dict[str, list[float]] = page.evaluate(AREAS, base64.b64encode(png).decode())
    return areas


def difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    pairs = zip(one["areas"], other["areas"], strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(one["areas"])


def test_every_view_in_both_themes_on_a_phone_by_keyboard_and_as_in_the_docs(
    open_view: Callable[..., Any], ui_server: RunningServer
) -> None:
    with open_view("text", color_scheme="dark") as page:
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Skip to the content")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#match-title")).to_be_focused()
        expect(page).to_have_title("Match · Smart Embedder")
        assert set(page.eval_on_selector_all("*", SECONDS)) == {0}, "nothing moves"
        page.go_back()
        expect(page.locator("#text-view")).to_be_visible()
        dark = page.evaluate(PAPER)
        page.click("#theme")
        light = page.evaluate(PAPER)
        assert light != dark
        page.reload()
        assert page.evaluate(PAPER) == light
        page.click("#theme")
        assert page.evaluate(PAPER) == dark

        # It follows the system until it is switched, and after it is switched back.
        likeness = {}
        for view in SHOWN:
            page.click(f"#to-{view}")
            wait_for_view(page, view)
            for name, (of_view, theme, window) in PICTURES.items():
                if of_view == view:
                    page.emulate_media(color_scheme=theme)
                    page.set_viewport_size(window)
                    likeness[name] = compare_with_picture(page, ui_server, view, name)
            for button in page.locator(f"#{view}-view summary").all():
                button.click()
            for theme, viewport in {"light": DESKTOP, "dark": PHONE}.items():
                page.emulate_media(color_scheme=theme)
                expect(page.locator("html")).to_have_attribute("data-theme", theme)
                page.set_viewport_size(viewport)
                assert findings(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        # The tolerance tells views and themes apart.
        assert difference(likeness["ui-text.png"], likeness["ui-match.png"]) > TOLERANCE
        # On a phone each heading of the models is one word, on one line.
        # The page may draw the table anew at any moment.
        row = "document.querySelector('#served thead tr')?.offsetHeight"
        page.wait_for_function(f"{row} > 0")
        assert page.evaluate(row) < 40


def compare_with_picture(page, server: RunningServer, view: str, name: str) -> Any:
    """Compare the page with a picture of the docs, and return the areas of the picture."""
    if WRITES:
        page.reload()  # Without focus or hovering.
        wait_for_view(page, view)
    if view == "service":
        work_for(server, page)
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    page.evaluate("document.fonts.ready")
    picture = page.screenshot()
    if WRITES:
        (DOCS / name).write_bytes(picture)
    assert (DOCS / name).stat().st_size < MOST_BYTES
    shown, wanted = (areas_of(page, png) for png in (picture, (DOCS / name).read_bytes()))
    assert shown["size"] == wanted["size"]
    assert difference(shown, wanted) < TOLERANCE, name
    return wanted


def test_the_documentation_opens_our_groups_and_holds_on_a_phone(
    browser, ui_server: RunningServer
) -> None:
    with open_page(browser, ui_server.url, "docs", color_scheme="dark") as page:
        page.wait_for_selector(".opblock")
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert colour.startswith("rgb(")  # Without transparency.
        assert sum(map(int, re.findall(r"\d+", colour))) < 150
        page.emulate_media(color_scheme="light")
        groups = page.locator(".opblock-tag")
        names = {
            group.get_attribute("data-tag"): group.get_attribute("data-is-open")
            for group in groups.all()
        }
        assert [name for name, is_open in names.items() if is_open == "true"] == OURS
        assert len(names) > len(OURS)
        # The description stands above them, and no button asks for a token.
        limits, first = page.locator(".info__description"), groups.first.bounding_box()["y"]
        assert limits.bounding_box()["y"] < first < DESKTOP["height"] / 2
        assert page.locator(".authorize, .authorization__btn").count() == 0
        expect(limits.locator("details")).not_to_have_attribute("open", "")
        expect(limits).to_contain_text("16 MiB")
        expect(limits).to_contain_text("1,024; at least 2,048")

        page.set_viewport_size(PHONE)
        for group in page.locator(".opblock-tag small").all():
            assert group.bounding_box()["width"] > LEAST_WIDTH
        page.locator("text=Embed texts").first.click()
        operation = page.locator(".opblock.is-open")
        operation.locator(".responses-table .microlight").nth(1).wait_for()
        for cell in operation.locator("tbody .response-col_description").all():
            assert cell.bounding_box()["width"] > LEAST_WIDTH
        for viewport in (PHONE, DESKTOP):
            page.set_viewport_size(viewport)
            assert operation.bounding_box()["height"] < MOST_PIXELS
            assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
