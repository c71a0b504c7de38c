"""Pictures of every view, and those of the documentation, compared loosely with the page of now.

`WRITE_PICTURES=1 python -m pytest tests/ui/test_pictures.py` makes these anew, and leaves the
others in build/pictures, to be looked at. Fonts differ between machines, so only the size and the
lightness of large areas are compared.
"""

import base64
import os
from pathlib import Path

import pytest

from tests.support.server import REPOSITORY, RunningServer
from tests.ui.conftest import PHONE, STILL, VIEWS, open_page, wait_for_view

pytestmark = pytest.mark.long

DOCS = REPOSITORY / "docs"
MOST_BYTES = 300_000
# The mean difference of two areas of the picture, from 0 (the same) to 1 (black and white).
TOLERANCE = 0.06
WRITES = bool(os.environ.get("WRITE_PICTURES"))
STEPS = 24 if WRITES else 1
WIDTHS = (390, 768, 1440)
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
  const bytes = Uint8Array.from(atob(encoded), (each) => each.charCodeAt(0));
  const picture = await createImageBitmap(new Blob([bytes]));
  const context = new OffscreenCanvas(24, 16).getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, 24, 16);
  const { data } = context.getImageData(0, 0, 24, 16);
  const lightness = (i) => (data[4 * i] + data[4 * i + 1] + data[4 * i + 2]) / 765;
  const areas = Array.from({ length: 24 * 16 }, (_, i) => lightness(i));
  return { size: [picture.width, picture.height], areas };
}"""


def work_for(server: RunningServer, page) -> None:
    """Requests between the points of the charts, of a minute where a picture is made."""
    with server.client() as client:
        for step in range(STEPS):
            texts = ["How full is a batch, and how long does a request take?"] * (1 + step * 7 % 11)
            client.post("/embeddings", json={"sentences": texts, "return_colbert": False})
            page.wait_for_event("response", lambda answer: answer.url.endswith("/metrics"))


@pytest.fixture(scope="module")
def areas_of(browser):
    page = browser.new_page()
    yield lambda png: page.evaluate(AREAS, base64.b64encode(png).decode())
    page.close()


def photograph(browser, server: RunningServer, view: str, theme: str, window) -> bytes:
    """What a window of this size shows of the view."""
    look = {"viewport": window, "media": STILL | {"color_scheme": theme}}
    with open_page(browser, server.url, view, **look) as page:
        wait_for_view(page, view)
        # Once more: the times of a server's first requests are not those that it has later.
        page.reload()
        wait_for_view(page, view)
        if view == "service":
            work_for(server, page)
        page.mouse.move(0, 0)
        page.evaluate("document.fonts.ready")
        return page.screenshot()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_the_page(browser, areas_of, ui_server: RunningServer, name: str) -> None:
    file = DOCS / name
    now = photograph(browser, ui_server, *PICTURES[name])
    if WRITES:
        Path(file).write_bytes(now)
    assert file.stat().st_size < MOST_BYTES
    shown, wanted = areas_of(now), areas_of(file.read_bytes())
    assert shown["size"] == wanted["size"]
    pairs = zip(shown["areas"], wanted["areas"], strict=True)
    assert sum(abs(one - other) for one, other in pairs) / len(wanted["areas"]) < TOLERANCE


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_as_wide_as_its_window_and_in_one_theme_from_top_to_bottom(
    browser, areas_of, ui_server: RunningServer, view: str, theme: str
) -> None:
    folder = REPOSITORY / "build" / "pictures"
    with open_page(browser, ui_server.url, view, media=STILL | {"color_scheme": theme}) as page:
        wait_for_view(page, view)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("document.fonts.ready")
            picture = page.screenshot(full_page=True)
            if WRITES:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{view}-{width}-{theme}.png").write_bytes(picture)
            shown = areas_of(picture)
            light = sum(each > 0.5 for each in shown["areas"]) / len(shown["areas"])
            assert shown["size"][0] == width
            assert light > 0.9 if theme == "light" else light < 0.1


def test_two_views_are_no_likeness(areas_of) -> None:
    """The tolerance tells views and themes apart."""
    light, dark = (areas_of((DOCS / name).read_bytes()) for name in ("ui-text.png", "ui-match.png"))
    pairs = zip(light["areas"], dark["areas"], strict=True)
    assert sum(abs(one - other) for one, other in pairs) / len(light["areas"]) > TOLERANCE
