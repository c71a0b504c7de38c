"""What the page gives to take away: code that runs, links that ask before they send, and JSON."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.support.server import RunningServer
from tests.ui.conftest import open_page, wait_for_view

pytestmark = pytest.mark.long

# What a shell, a heredoc, Python and JavaScript may take for the end of something.
TRICKY = """it's "quoted" $(touch x) `y` \\\\ ${z} \'\'\' \n\nEND\n": true, 😀 </script>"""
RUN = {
    "curl": ["bash", "-c"],
    "Python": [sys.executable, "-c"],
    "JavaScript": ["node", "--input-type=module", "-e"],
}


def copied(page, button: str) -> str:
    """What stands in the field below the buttons, whether or not the browser copies it."""
    view = page.url.split("#")[1]
    page.click(f"#{view}-output >> text={button}")
    field = page.locator(f"#{view}-output textarea[readonly]")
    expect(field).to_be_visible()
    return field.input_value()


@pytest.mark.parametrize("language", RUN)
def test_the_copied_code_makes_the_same_requests(open_view, language: str, tmp_path: Path) -> None:
    program, *options = RUN[language]
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    page = open_view("text")
    page.fill("#texts", TRICKY)
    expect(page.locator("#text-count")).to_contain_text("2 texts")
    code = copied(page, f"Copy as {language}")
    assert "API_TOKEN" not in code
    done = subprocess.run(
        [program, *options, code], capture_output=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    read = [each["text"] for each in json.loads(done.stdout)["data"]]
    assert read == [text.strip() for text in TRICKY.split("\n\n")]
    assert list(tmp_path.iterdir()) == []


def test_the_code_of_a_search_ranks_as_the_page_does(open_view, tmp_path: Path) -> None:
    page = open_view("search")
    code = copied(page, "Copy as Python")
    program = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(program, capture_output=True, cwd=tmp_path, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    passages = page.input_value("#corpus").split("\n\n")
    shown = []
    for hit in page.locator(".column.reranked .hit").all():
        letter, score = (hit.locator(part).inner_text() for part in (".name", ".number"))
        shown.append(f"{score}  {passages[ord(letter) - ord('A')]}")
    assert done.stdout.splitlines() == shown
    code = copied(page, "Copy as curl")
    bodies = [json.loads(part.split("\nEND")[0]) for part in code.split("<<'END'\n")[1:]]
    assert bodies[0]["sentences"] == [bodies[1]["query"]] == ["What does error E42 mean?"]
    assert len(bodies[1]["passages"]) == 20


def test_a_link_shows_the_same_again_when_the_user_wants_it(
    browser, open_view, ui_server: RunningServer
) -> None:
    first = open_view("match")
    first.fill("#match-query", "a <b>bold</b> & strange? #query")
    expect(first.locator(".chips")).to_contain_text("strange")
    link = copied(first, "Copy a link")
    with open_page(browser, ui_server.url, link.split("#")[1]) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.method))
        expect(page.locator("#match-query")).to_have_value("a <b>bold</b> & strange? #query")
        expect(page.locator("#link-bar")).to_contain_text("A link has filled in this view.")
        # No address keeps the texts.
        expect(page).to_have_url(f"{ui_server.url}/ui#match")
        page.click("#to-text")
        wait_for_view(page, "text")
        page.click("#to-match")
        expect(page.locator("#match-output")).to_be_hidden()
        page.click("#link-open")
        wait_for_view(page, "match")
        expect(page.locator(".chips")).to_contain_text("strange")
        expect(page.locator("#link-bar")).to_be_hidden()


def work_of(page) -> list[str]:
    """What this page has asked for vectors; the server may still count for one before it."""
    asked = page.evaluate("performance.getEntriesByType('resource').map(({name}) => name)")
    return [url for url in asked if url.rstrip("/").endswith(("/embeddings", "/rerank"))]


@pytest.mark.parametrize("view", ["text?texts", "match?passages", "search?text"])
def test_a_link_of_a_stranger_sends_nothing_and_is_no_markup(
    browser, ui_server: RunningServer, view: str
) -> None:
    text = quote("<img src=x onerror=alert(1)><script>alert(2)</script>\n\nAnother.")
    link = f"{view}={text}&query=q&embedder={quote('<b>x')}&constructor=1&__proto__=2"
    with open_page(browser, ui_server.url, link) as page:
        expect(page.locator("#link-bar")).to_contain_text("for <b>x")
        name = view.partition("?")[0]
        field = {"text": "#texts", "match": "#match-passages", "search": "#corpus"}
        expect(page.locator(field[name])).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert not work_of(page)
        page.click("#link-open")
        name = view.split("?", maxsplit=1)[0]
        expect(page.locator(f"#{name}-view")).to_contain_text("onerror=alert(1)")
        assert work_of(page)
        assert page.locator("main img").count() == 0


@pytest.mark.parametrize(
    "link", ["constructor", "__proto__?texts=a", "text?texts", "search?%", "?"]
)
def test_an_address_that_is_no_link_shows_the_page(
    browser, ui_server: RunningServer, link: str
) -> None:
    with open_page(browser, ui_server.url, link) as page:
        expect(page.locator("main > section:visible")).to_have_count(1)


def test_long_texts_and_files_have_no_link(open_view, tmp_path: Path) -> None:
    page = open_view("text")
    page.fill("#texts", "long " * 3000)
    expect(page.locator(".cut-mark")).to_be_visible()
    page.click("#text-output >> text=Copy a link")
    expect(page.locator("#text-output")).to_contain_text("characters long; the limit is 8,000.")
    page.goto(page.url.split("#")[0] + "#text?texts=" + "x" * 9000)
    expect(page.locator("#link-text")).to_have_text("The link is too long, so it was not read.")
    (tmp_path / "a.txt").write_text("A file.")
    page.click("#to-search")
    wait_for_view(page, "search")
    page.click("#drop-zone summary")
    page.set_input_files("#corpus-files", tmp_path / "a.txt")
    expect(page.locator(".column.dense .hit")).to_have_count(1)
    wait_for_view(page, "search")
    page.click("#search-output >> text=Copy a link")
    expect(page.locator("#search-output")).to_contain_text("A link cannot contain files")


@pytest.mark.parametrize("view", ["text", "match", "search"])
def test_what_is_shown_is_saved_as_json(open_view, view: str) -> None:
    page = open_view(view)
    with page.expect_download() as download:
        page.click(f"#{view}-output >> text=Save as JSON")
    saved = json.loads(Path(download.value.path()).read_text())
    assert download.value.suggested_filename == f"{view}.json"
    assert saved["requests"][0]["path"] == "embeddings"
    if view == "text":
        assert len(saved["result"][0]["vectors"]["dense"]["values"]) == 384
    elif view == "match":
        assert saved["result"][0]["scores"]["colbert"] > 0
    else:
        best = saved["result"]["reranked"][0]
        assert (best["rank"], best["passage"], best["title"]) == (1, "A", "")
        assert best["text"].startswith("Error E42")
