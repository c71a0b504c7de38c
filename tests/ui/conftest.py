"""A headless Chromium, and servers with the demo model, for the tests of the page at /ui."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import RunningServer, run_server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VIEWS = ["text", "match", "search", "service"]
# What a view shows last.
SHOWN = {
    "text": "#text-kinds:not(:has-text('…')) .total",
    "match": "#match-table tfoot",
    "search": "#why .ribbon",
    "service": "#models table",
}
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 360, "height": 740}
STILL = {"reduced_motion": "reduce"}
# On a busy machine everything may take long; nothing is asserted about it.
PATIENCE = 90_000
# Chromium logs each answer that is no success; the tests cause some.
_EXPECTED = "Failed to load resource"


@pytest.fixture(scope="session")
def ui_server(demo_checkpoint: Path, hold: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server with the demo model, whose queue has four places."""
    folder = tmp_path_factory.mktemp("ui")
    model = folder / "smart-embedder-demo"  # The page shows this name.
    model.symlink_to(demo_checkpoint)
    settings = {
        "EMBEDDING_MODEL": str(model),
        "MAX_QUEUE_SIZE": "4",
        "GPU_PROCESS_TIMEOUT": "80",
        "HOLD": str(hold),
        "TRUSTED_PROXIES": "127.0.0.1",
    }
    with run_server(folder, "tests.faults.faulty_server", **settings) as running:
        yield running


# Not longer than a module: while it is open, no test of this process can run an event loop.
@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    playwright.expect.set_options(timeout=PATIENCE)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()
    _contexts.clear()


# Of the browser, by their options.
_contexts: dict[str, Any] = {}


def _new_context(browser, **options) -> Any:
    context = browser.new_context(**({"viewport": DESKTOP, "color_scheme": "light"} | options))
    context.set_default_timeout(PATIENCE)
    return context


def _context(browser, url: str, **options) -> Any:
    """The browser's context of these options, where a page costs a third of its first one.

    Another page of this machine stays open in it, which keeps the process that draws them.
    """
    name = repr(sorted(options.items()))
    if name not in _contexts:
        _contexts[name] = _new_context(browser, **options)
        _contexts[name].new_page().goto(f"{url}/health/live")
    return _contexts[name]


@contextmanager
def open_page(
    browser,
    url: str,
    view: str = "text",
    *,
    viewport=DESKTOP,
    media=None,
    own_clock=False,
    **options,
) -> Iterator:
    """A page in a new tab; at the end nothing may have failed or come from elsewhere.

    `media` are the features that `emulate_media` knows, which need no context of their own.
    A clock that is set is that of a whole context: `own_clock` makes one for this page alone.
    """
    context = _new_context(browser, **options) if own_clock else _context(browser, url, **options)
    page = context.new_page()
    page.set_viewport_size(viewport)
    page.emulate_media(**media or {})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"{error}\n{error.stack}"))
    page.on("console", lambda message: problems.extend(_problem(message)))
    page.on("request", lambda request: problems.extend(_foreign(request.url, url)))
    try:
        page.goto(f"{url}/ui#{view}")
        yield page
        assert problems == []
    finally:
        page.evaluate("localStorage.clear()")  # What a tab does not keep to itself.
        (context if own_clock else page).close()


def _problem(message) -> list[str]:
    wrong = message.type in {"error", "warning"} and _EXPECTED not in message.text
    return [message.text] if wrong else []


def _foreign(address: str, url: str) -> list[str]:
    return [] if address.startswith(f"{url}/") else [f"{address} was asked for"]


# All nodes are checked; of those that pass only one is described for each rule.
_RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "resultTypes": ["violations"],
}


def findings(page, context=None) -> list[str]:
    """What axe objects to."""
    from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 - beside playwright

    violations = Axe().run(page, context=context, options=_RULES).response["violations"]
    return [f"{each['id']}: {each['help']} {_shown(each['nodes'])}" for each in violations]


def _shown(nodes) -> list[str]:
    return [node["html"][:160] + node["failureSummary"] for node in nodes[:3]]


def wait_for_view(page, view: str) -> None:
    """Wait until the view shows its results."""
    page.wait_for_selector(SHOWN[view], state="visible")


@pytest.fixture(scope="module")
def shown(browser, ui_server: RunningServer):
    """Gives a view as it is at first, opened once for all tests that leave it so."""
    with ExitStack() as stack:

        @cache
        def show(view: str):
            page = stack.enter_context(open_page(browser, ui_server.url, view))
            wait_for_view(page, view)
            return page

        yield show


@pytest.fixture
def open_view(browser, ui_server: RunningServer):
    """Opens a view of `ui_server`, when everything on it is shown."""
    pages = []

    def open_one(view: str, **options):
        manager = open_page(browser, ui_server.url, view, **options)
        page = manager.__enter__()
        pages.append(manager)
        wait_for_view(page, view)
        return page

    yield open_one
    for manager in pages:
        manager.__exit__(None, None, None)
