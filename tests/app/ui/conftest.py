"""A headless Chromium, and a server with the demo model, for journeys through the page at /ui."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import RunningServer, run_server
from tests.support.waiting import LIMIT

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# The last thing that each view shows.
SHOWN = {
    "text": "#text-kinds:not(:has-text('…')) .total",
    "match": "#match-table tfoot",
    "search": "#why .ribbon",
    "service": "#models table",
}
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 360, "height": 740}
STILL = {"reduced_motion": "reduce"}
# One client gets three of the queue's four places.
PLACES = 3
# In milliseconds.
PATIENCE = LIMIT * 1000
# Chromium logs each response with an error status; the tests cause some.
_EXPECTED = "Failed to load resource"
_opened = ExitStack()
_RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "resultTypes": ["violations"],
}


@pytest.fixture(scope="session")
def ui_server(demo_checkpoint: Path, hold: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server with the demo model, whose queue has four places."""
    folder = tmp_path_factory.mktemp("ui")
    model = folder / "smart-embedder-demo"  # The page shows this name.
    model.symlink_to(demo_checkpoint)
    settings = {
        "EMBEDDING_MODEL": str(model),
        "MAX_QUEUE_SIZE": str(PLACES + 1),
        "HOLD": str(hold),
    }
    with run_server(folder, "tests.faults.faulty_server", **settings) as running:
        yield running


@pytest.fixture
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return _launch_browser()


@cache
def _launch_browser() -> Any:
    playwright.expect.set_options(timeout=PATIENCE)
    running = _opened.enter_context(playwright.sync_playwright())
    browser = running.chromium.launch(executable_path=CHROMIUM)
    _opened.callback(browser.close)
    return browser


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Close the browser after this folder: while it is open, no test can run an event loop."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _launch_browser.cache_clear()
        _opened.close()


@contextmanager
def open_page(browser, url: str, page_of: str = "ui#text", **options: Any) -> Iterator:
    """A page in a context of its own; at the end nothing may have failed or come from elsewhere."""
    given = {"viewport": DESKTOP, "color_scheme": "light"} | STILL | options
    context = browser.new_context(**given)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"{error}\n{error.stack}"))
    page.on("console", lambda message: problems.extend(_problem(message)))
    page.on("request", lambda request: problems.extend(_foreign(request.url, url)))
    try:
        page.goto(f"{url}/{page_of}")
        yield page
        page.unroute_all(behavior="ignoreErrors")
        assert problems == []
    finally:
        context.close()


def _problem(message) -> list[str]:
    wrong = message.type in {"error", "warning"} and _EXPECTED not in message.text
    return [message.text] if wrong else []


def _foreign(address: str, url: str) -> list[str]:
    inside = address.startswith((f"{url}/", f"blob:{url.split('/', maxsplit=1)[0]}"))
    return [] if inside else [f"{address} was asked for"]


def findings(page, context=None) -> list[str]:
    """What axe objects to."""
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 - beside playwright

    violations = Axe().run(page, context=context, options=_RULES).response["violations"]
    return [f"{found['id']}: {found['help']} {_shown(found['nodes'])}" for found in violations]


def _shown(nodes) -> list[str]:
    return [node["html"][:160] + node["failureSummary"] for node in nodes[:3]]


def wait_for_view(page, view: str) -> None:
    """Wait until the view shows its results."""
    page.wait_for_selector(SHOWN[view], state="visible")


@pytest.fixture
def open_view(browser, ui_server: RunningServer):
    """Opens a view of `ui_server`, when everything on it is shown."""

    @contextmanager
    def open_one(view: str, **options: Any) -> Iterator:
        with open_page(browser, ui_server.url, f"ui#{view}", **options) as page:
            wait_for_view(page, view)
            yield page

    return open_one


def copied(page, button: str) -> str:
    """What stands in the field below the buttons, whether or not the browser copies it."""
    view = page.url.split("#")[1]
    page.click(f"#{view}-output >> text={button}")
    field = page.locator(f"#{view}-output textarea[readonly]")
    playwright.expect(field).to_be_visible()
    return field.input_value()


def index(page, text: str) -> None:
    """Index a text that is typed into the view Search."""
    if page.locator("#corpus").is_hidden():
        page.click("#drop-zone summary")
    page.fill("#corpus", text)
    page.click("#index-button")


def lines(number: int) -> str:
    """As many passages."""
    return "\n".join(f"Part {i} is kept on shelf {i % 40}." for i in range(number))
