"""The API's documentation at /docs, in a browser: what is open, in the dark, and on a phone."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.server import RunningServer
from tests.ui.conftest import DESKTOP, PHONE, open_page

OURS = ["embeddings", "rerank", "operation"]
# Of an operation. With a response for each status it has three times as many.
MOST_PIXELS = 2200
# About three words.
LEAST_WIDTH = 150


@pytest.fixture
def docs(browser, ui_server: RunningServer):
    """Shows /docs in a viewport and a theme, when its operations are there."""
    managers = []

    def show(viewport=DESKTOP, theme: str = "light") -> Any:
        manager = open_page(
            browser, ui_server.url, viewport=viewport, media={"color_scheme": theme}
        )
        managers.append(manager)
        page = manager.__enter__()
        page.goto(f"{ui_server.url}/docs")
        page.wait_for_selector(".opblock")
        return page

    yield show
    for manager in managers:
        manager.__exit__(None, None, None)


def test_our_groups_are_open_and_those_of_other_servers_closed(docs: Callable[..., Any]) -> None:
    page = docs()
    groups = page.locator(".opblock-tag")
    opened = {
        group.get_attribute("data-tag"): group.get_attribute("data-is-open")
        for group in groups.all()
    }
    assert [name for name, is_open in opened.items() if is_open == "true"] == OURS
    assert len(opened) > len(OURS)
    # The description stands above them, and no button asks for a token.
    first = groups.first.bounding_box()["y"]
    assert page.locator(".info__description").bounding_box()["y"] < first < DESKTOP["height"] / 2
    assert page.locator(".authorize, .authorization__btn").count() == 0


def test_it_is_dark_in_the_dark_theme(docs: Callable[..., Any]) -> None:
    page = docs(theme="dark")
    colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert colour.startswith("rgb(")  # Without transparency.
    assert sum(map(int, re.findall(r"\d+", colour))) < 150


def test_an_operation_is_short_and_a_phone_squeezes_no_words(docs: Callable[..., Any]) -> None:
    page = docs(PHONE)
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
