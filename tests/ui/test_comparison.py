"""A second format beside the index, in a browser: rankings, moves, sizes, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.support.held import full_queue
from tests.support.server import REPOSITORY, RunningServer
from tests.ui.conftest import PHONE, STILL, findings, open_page, wait_for_view
from tests.ui.test_indexing import PLACES, index, lines

pytestmark = pytest.mark.long

# Bytes of a vector of 384 numbers.
FORMATS = {"float32": 1536, "float16": 768, "ubinary": 48}


def compare(page, **options: str) -> None:
    if page.locator("#compare-button").is_hidden():
        page.click("#compare-panel summary")
    for what, value in options.items():
        page.select_option(f"#compare-{what}", value)
    page.click("#compare-button")


def column(page, side: str) -> list[tuple[str, str, float]]:
    """The letter of each passage, how it has moved, and its score."""
    hits = page.locator(f".column.{side} .hit").all()
    return [
        (
            hit.locator(".name").inner_text(),
            " ".join(hit.locator(".moved").all_inner_texts()),
            float(hit.locator(".number").inner_text()),
        )
        for hit in hits
    ]


def embedded(server: RunningServer, texts: list[str]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The service's dense and ColBERT vectors in float32."""
    with server.client() as client:
        found = client.post("/embeddings", json={"sentences": texts}).json()["data"]
    made = [each["embeddings"] for each in found]
    return np.array([each["dense"] for each in made]), [np.array(each["colbert"]) for each in made]


def rounded(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """The vectors as they are in a format, of unit length where that tells no length."""
    if dtype == "ubinary":
        return np.where(vectors > 0, 1, -1) / np.sqrt(vectors.shape[-1])
    return vectors.astype(dtype).astype(np.float64)


def test_formats_are_compared_by_the_vectors_of_the_service(
    open_view, ui_server: RunningServer
) -> None:
    page = open_view("search")
    query, passages = page.input_value("#search-query"), page.input_value("#corpus").split("\n\n")
    (asked, *dense), (tokens, *colbert) = embedded(ui_server, [query, *passages])
    for dtype, size in FORMATS.items():
        compare(page, format=dtype)
        expect(page.locator(".column.second h3")).to_contain_text(dtype.replace("ubinary", "bits"))
        sizes = page.locator("#compare-facts tr", has_text="Dense, bytes").locator(".number")
        expect(sizes).to_have_text(["388", f"{size:,}"])
        vectors = rounded(np.array(dense), dtype)
        scores = vectors @ asked / np.linalg.norm(vectors, axis=1) / np.linalg.norm(asked)
        shown = [score for _, _, score in column(page, "second")]
        np.testing.assert_allclose(shown, np.sort(scores)[::-1][:10], atol=0.00051)
        page.click("#compare-kinds >> text=ColBERT")
        expect(page.locator(".column.second h3")).to_contain_text("words in context")
        best = [(tokens @ rounded(each, dtype).T).max(axis=1).mean() for each in colbert]
        shown = [score for _, _, score in column(page, "second")]
        np.testing.assert_allclose(shown, np.sort(best)[::-1][:10], atol=0.00051)
        page.click("#compare-kinds >> text=Dense")
    # Weights are the same in each format.
    assert page.locator("#compare-kinds button").all_inner_texts() == ["Dense", "ColBERT", "Fused"]


def test_each_passage_tells_how_it_has_moved(open_view) -> None:
    page = open_view("search")
    compare(page, format="ubinary")
    expect(page.locator(".column.second .hit")).to_have_count(10)
    first, second = column(page, "first"), column(page, "second")
    before = {name: place for place, (name, _, _) in enumerate(first, start=1)}
    shared = [name for name, _, _ in second if name in before]
    still = 0
    for place, (name, moved, _) in enumerate(second, start=1):
        was = before.get(name) or int(moved.split()[-1])
        still += was == place
        way = "up" if was > place else "down"
        assert moved == ("same" if was == place else f"{way} {abs(was - place)}, was {was}")
    gone = [moved for name, moved, _ in first if name not in shared]
    assert gone
    assert all(int(moved.removeprefix("then ")) > 10 for moved in gone)
    told = (
        f"Of the first 10 passages, {len(shared)} are in both rankings, {still} at the same place."
    )
    expect(page.locator("#compare-summary")).to_contain_text(told)
    # The passage that is chosen here is explained, and the JSON has both rankings.
    page.locator(".column.second .hit").last.click()
    expect(page.locator("#why-title")).to_contain_text(f"passage {second[-1][0]}")
    with page.expect_download() as download:
        page.click("#search-output >> text=Save as JSON")
    compared = json.loads(Path(download.value.path()).read_text("utf-8"))["result"]["compared"]
    sides = {"smart-embedder-demo, int8": first, "smart-embedder-demo, bits": second}
    assert {side: [hit["passage"] for hit in hits] for side, hits in compared.items()} == {
        side: [name for name, _, _ in hits] for side, hits in sides.items()
    }


def test_a_comparison_follows_the_query_and_ends_with_its_passages(open_view) -> None:
    page = open_view("search")
    compare(page, format="int8")
    expect(page.locator("#compare-message")).to_contain_text("This is the model and number format")
    expect(page.locator("#compare-output")).to_be_hidden()
    compare(page, format="float16")
    expect(page.locator("#compare-message")).to_be_hidden()
    page.fill("#search-query", "My rooms stay cold")
    expect(page.locator(".column.second .hit").first).to_contain_text("radiators")
    index(page, "A boat needs wind.\n\nBread needs flour.")
    expect(page.locator(".column.dense .hit")).to_have_count(2)
    expect(page.locator("#compare-output")).to_be_hidden()


def test_a_comparison_waits_for_a_busy_service_until_it_is_stopped(
    browser, ui_server: RunningServer, hold: Path
) -> None:
    with open_page(browser, ui_server.url, "search") as page:
        wait_for_view(page, "search")
        with full_queue(ui_server, hold, places=PLACES):
            compare(page, format="float16")
            expect(page.locator("#compare-state")).to_contain_text("The service is busy")
            page.click("#compare-stop")
            expect(page.locator("#compare-state")).to_have_text("")
        # It is not begun again by itself.
        page.fill("#search-query", "My rooms stay cold")
        expect(page.locator(".column.reranked .hit").first).to_contain_text("stays cold")
        expect(page.locator("#compare-output")).to_be_hidden()


def test_what_the_tab_cannot_hold_is_refused(browser, ui_server: RunningServer) -> None:
    file = REPOSITORY / "smart_embedder/ui/search/comparison.js"
    small = file.read_text("utf-8").replace("MOST_BYTES = 1e9", "MOST_BYTES = 1e5")
    with open_page(browser, ui_server.url, "search") as page:
        page.route(
            "**/comparison.js",
            lambda route: route.fulfill(body=small, content_type="text/javascript"),
        )
        page.reload()
        wait_for_view(page, "search")
        index(page, lines(200))
        expect(page.locator("#index-state")).to_contain_text("200 passages in this tab's memory")
        expect(page.locator(".column.reranked .hit")).to_have_count(10)
        compare(page, format="ubinary")
        message = page.locator("#compare-message")
        expect(message).to_contain_text("In bits these passages would take")
        expect(message).to_contain_text("The limit is 100 KB: index fewer passages.")


def test_axe_finds_nothing_in_a_comparison_and_it_is_not_wider_than_a_phone(open_view) -> None:
    page = open_view("search", media=STILL)
    compare(page, format="ubinary")
    expect(page.locator(".column.second .hit")).to_have_count(10)
    part = {"include": [["#compare-panel"]]}
    assert findings(page, part) == []
    first, second = (page.locator(f".column.{side}").bounding_box() for side in ("first", "second"))
    assert first["y"] == second["y"]
    page.click("#theme")
    page.set_viewport_size(PHONE)
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert findings(page, part) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    first, second = (page.locator(f".column.{side}").bounding_box() for side in ("first", "second"))
    assert first["y"] + first["height"] <= second["y"]
