"""Indexing in the browser's memory: hundreds of passages, a full queue, and a stop."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.held import full_queue
from tests.support.server import RunningServer
from tests.ui.conftest import open_page, wait_for_view

pytestmark = pytest.mark.long

# One client gets three quarters of four.
PLACES = 3
MUCH_PATIENCE = 400_000


def lines(number: int) -> str:
    """As many passages."""
    return "\n".join(f"Part {i} is kept on shelf {i % 40}." for i in range(number))


def index(page, text: str) -> None:
    if page.locator("#corpus").is_hidden():
        page.click("#drop-zone summary")
    page.fill("#corpus", text)
    page.click("#index-button")


def test_hundreds_of_passages_are_indexed_and_searched(browser, server: RunningServer) -> None:
    """With random vectors: a passage is found by its own words."""
    passages = lines(501).split("\n")
    passages[487] = "The keeper of the lighthouse repairs a violin."
    with open_page(browser, server.url, "search") as page:
        wait_for_view(page, "search")
        index(page, "\n".join(passages))
        done = "501 passages in this tab's memory"
        expect(page.locator("#index-state")).to_contain_text(done, timeout=MUCH_PATIENCE)
        expect(page.locator("#index-progress")).to_be_hidden()
        page.fill("#search-query", passages[487])
        for kind in ("dense", "colbert", "fused", "reranked"):
            expect(page.locator(f".column.{kind} .name").first).to_have_text("RT")
        expect(page.locator("#why-title")).to_contain_text("passage RT")
        assert page.locator(".column.colbert .hit").count() == 10


def test_a_full_queue_is_waited_for(browser, ui_server: RunningServer, hold: Path) -> None:
    refused = 'embedding_requests_rejected_total{reason="backpressure"}'
    with open_page(browser, ui_server.url, "search") as page:
        wait_for_view(page, "search")
        before = ui_server.metric(refused)
        with full_queue(ui_server, hold, places=PLACES):
            index(page, lines(40))
            expect(page.locator("#index-state")).to_contain_text(
                "The service is busy: trying again"
            )
            assert ui_server.metric(refused) > before
            page.click("text=Service")
            expect(page.locator("#chart-queue .figure-number")).to_have_text(str(PLACES))
            expect(page.locator("#chart-refused .figure-note")).not_to_have_text(
                "none since startup"
            )
        page.click("text=Search")
        expect(page.locator("#index-state")).to_contain_text("40 passages in this tab's memory")


def test_a_full_queue_is_told_where_nothing_is_tried_again(
    browser, ui_server: RunningServer, hold: Path
) -> None:
    with open_page(browser, ui_server.url, "text") as page:
        wait_for_view(page, "text")
        with full_queue(ui_server, hold, places=PLACES):
            page.fill("#texts", "another text")
            expect(page.locator("#text-message")).to_contain_text("Try again in")
        page.fill("#texts", "one more text")
        expect(page.locator(".tokens")).to_have_text("one more text")
        expect(page.locator("#text-message")).to_be_hidden()


def test_old_results_stay_until_a_new_index_is_complete_or_stopped(
    browser, ui_server: RunningServer, hold: Path
) -> None:
    with open_page(browser, ui_server.url, "search") as page:
        wait_for_view(page, "search")
        state, note = page.locator("#index-state"), page.locator("#search-before")
        hits = page.locator(".column.dense .hit")
        with full_queue(ui_server, hold, places=PLACES):
            index(page, lines(60))
            expect(state).to_contain_text("trying again")
            expect(note).to_be_visible()
            expect(hits.first).to_contain_text("Error E42: the circulation pump")
            page.click("#stop-button")
            # Nothing of the new text is indexed.
            expect(state).to_contain_text("26 passages in this tab's memory")
            expect(note).to_be_hidden()
        sent: list[int] = []

        def answer_first(route) -> None:
            passages = len(route.request.post_data_json["sentences"])
            if passages > 1:
                sent.append(passages)
            if passages == 1 or len(sent) == 1:
                route.continue_()

        page.route("**/embeddings", answer_first)
        index(page, lines(60))
        expect(state).to_contain_text("Indexing: 8 of 60 passages, about")
        expect(note).to_be_visible()
        page.fill("#search-query", "My rooms stay cold")
        expect(hits.first).to_contain_text("radiators")
        page.click("#stop-button")
        expect(state).to_contain_text("8 of 60 passages in this tab's memory")
        expect(hits).to_have_count(8)
        page.unroute_all()


def test_a_request_that_fails_ends_the_others_of_its_index(browser, server: RunningServer) -> None:
    failure = {"detail": "The model failed.", "code": "inference_failed"}
    with open_page(browser, server.url, "search") as page:
        wait_for_view(page, "search")
        asked: list[str] = []

        def fail_first(route) -> None:
            asked.append(route.request.url)
            route.fulfill(status=500, json=failure) if len(asked) == 1 else route.continue_()

        page.route("**/embeddings", fail_first)
        index(page, lines(200))
        expect(page.locator("#index-message")).to_have_text("The model failed.")
        page.wait_for_event("response", lambda answer: answer.url.endswith("/health"))
        assert len(asked) == 2
        expect(page.locator(".column.dense .hit")).to_have_count(10)
        page.unroute_all()


def test_a_text_without_a_passage_replaces_no_other(open_view) -> None:
    page = open_view("search")
    index(page, "  \n ")
    expect(page.locator("#index-message")).to_have_text("There is no text to index.")
    expect(page.locator("#index-state")).to_contain_text("26 passages in this tab's memory")
    expect(page.locator("#search-output")).to_be_visible()
