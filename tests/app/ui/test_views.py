"""Text and Match: what a text and a match show, and what one may take away of it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.app.ui.conftest import PLACES, copied, findings, open_page, wait_for_view
from tests.support.held import full_queue
from tests.support.server import RunningServer

pytestmark = pytest.mark.long

# What a shell, a heredoc, Python and JavaScript may take for the end of something.
TRICKY = """it's "quoted" $(touch x) `y` \\\\ ${z} \'\'\' \n\nEND\n": true, 😀 </script>"""
RUN = {
    "curl": ["bash", "-c"],
    "Python": [sys.executable, "-c"],
    "JavaScript": ["node", "--input-type=module", "-e"],
}
SHARES = """(tokens) =>
  tokens.map((token) => [token.textContent, +token.style.getPropertyValue("--share")])"""
STRANGE = "a <b>bold</b> & strange? #query"


def answer_with_times(page, times: Iterable[dict[str, float]]) -> None:
    """Have the service's answers to the page's requests for vectors tell these `timings_ms`."""
    remaining = iter(times)

    def answer(route) -> None:
        answered = route.fetch()
        content = answered.body()
        end = 8 + int.from_bytes(content[:8], "little")
        head = json.loads(content[8:end])
        report = json.loads(head["__metadata__"]["smart-embedder"])
        report["timings_ms"] |= next(remaining)
        head["__metadata__"]["smart-embedder"] = json.dumps(report)
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        body = len(text).to_bytes(8, "little") + text + content[end:]
        route.fulfill(response=answered, body=body)

    page.route("**/embeddings", answer)


def forwards(*inference: float, queue: float = 0) -> list[dict[str, float]]:
    return [{"queue": queue, "inference": time} for time in inference]


# After the view's request, those of all kinds together, dense, sparse, ColBERT, and so on.
TIMES = [
    # Noise in the first rounds.
    (forwards(*[9, 12, 4, 5] * 2, 9, 8, 4, 5), ["8.0 ms", "4.0 ms", "5.0 ms", "9.0 ms"]),
    # The device is busy.
    (forwards(9, 6, queue=0) + forwards(4, queue=21), ["–"] * 4),
]


def save_json(page, view: str) -> Any:
    with page.expect_download() as download:
        page.click(f"#{view}-output >> text=Save as JSON")
    assert download.value.suggested_filename == f"{view}.json"
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved["requests"][0]["path"] == "embeddings"
    return saved["result"]


def test_text_shows_weights_sizes_times_and_where_the_model_stops_reading(
    open_view: Callable[..., Any], ui_server: RunningServer, hold: Path, tmp_path: Path
) -> None:
    with open_view("text") as page:
        weights = dict(page.eval_on_selector_all(".token", SHARES))
        assert weights["boiler"] > 0.5
        assert weights["the"] < 0.3
        counted = page.locator(".weights .rest tr", has_text="the").locator(".number")
        assert counted.all_text_contents()[1] == "9"
        readout = page.locator(".text-result .readout")
        page.locator(".token", has_text="pump").first.hover()
        expect(readout).to_contain_text("pump: weight 0.")
        page.locator(".token").first.focus()
        page.keyboard.press("ArrowRight")
        expect(readout).to_contain_text("boiler: weight 0.")
        page.keyboard.press("End")
        expect(page.locator(":focus")).to_have_text(".")
        rows = page.locator("#text-kinds tr")
        names = [name.split("\n")[0] for name in rows.locator("th").all_inner_texts()]
        assert names == ["Dense", "Sparse", "ColBERT", "All three"]
        assert rows.first.locator("td").nth(1).inner_text() == "1.54 KB"
        assert len(save_json(page, "text")[0]["vectors"]["dense"]["values"]) == 384

        for number, (timed, told) in enumerate(TIMES):
            answer_with_times(page, [*forwards(5), *timed])
            page.fill("#texts", f"A text, timed in way {number}.")
            expect(page.locator("#text-results")).to_contain_text(f"way {number}")
            expect(page.locator("#text-kinds td:last-child")).to_have_text(told)
            page.unroute_all()

        page.fill("#texts", TRICKY)
        expect(page.locator(".text-result")).to_have_count(2)
        expect(page.locator("#text-count")).to_contain_text("2 texts")
        expect(rows.first).to_contain_text("2 vectors of 384")
        for language, (program, *options) in RUN.items():
            if shutil.which(program):
                command = [program, *options, copied(page, f"Copy as {language}")]
                done = subprocess.run(command, capture_output=True, cwd=tmp_path, check=True)
                read = [embedded["text"] for embedded in json.loads(done.stdout)["data"]]
                assert read == [text.strip() for text in TRICKY.split("\n\n")]
        assert list(tmp_path.iterdir()) == []

        with full_queue(ui_server, hold, places=PLACES):
            page.fill("#texts", "another text")
            expect(page.locator("#text-message")).to_contain_text("Try again in")
        page.click("text=Too long for the model")
        expect(page.locator("#text-message")).to_be_hidden()
        page.check("#text-pieces")
        cut = page.locator(".cut-mark")
        expect(cut).to_have_text("The model stops reading here, after 512 tokens")
        # A token that is a space alone has no place in the text.
        assert 450 < page.locator(".token:not(.cut)").count() <= 512 - 2
        expect(page.locator(".facts")).to_contain_text("cut off")
        # There are hundreds of tokens, each of which takes axe as long as all else.
        assert findings(page, {"include": [[".cut-mark"], [".token.cut:last-child"]]}) == []
        page.fill("#texts", "long " * 3000)
        expect(page.locator(".facts")).to_contain_text("2,490 tokens cut off")
        page.click("#text-output >> text=Copy a link")
        expect(page.locator("#text-output")).to_contain_text("characters long; the limit is 8,000.")
        page.fill("#texts", "")
        expect(page.locator("#text-output")).to_be_hidden()


def test_match_agrees_with_the_service_and_its_link_sends_nothing_by_itself(
    browser, open_view: Callable[..., Any], ui_server: RunningServer
) -> None:
    with open_view("match") as page:
        chips, readout = page.locator(".chip"), page.locator("#match-ribbon .readout")
        expect(page.locator(".ribbon .lines path")).to_have_count(chips.count())
        chips.filter(has_text="boiler").hover()
        expect(readout).to_contain_text("boiler best matches boiler, similarity 0.")
        chips.filter(has_text="boiler").focus()
        page.keyboard.press("ArrowRight")
        expect(readout).to_contain_text("cold best matches cold")
        expect(page.locator("#match-table tbody th").last).to_have_text("special tokens")
        page.check("#match-pieces")
        expect(chips.last).to_have_text("</s>")
        page.uncheck("#match-pieces")
        expect(chips.last).to_have_text("?")
        page.locator(".heat").focus()
        page.keyboard.press("ArrowRight")
        of_map = page.locator("#match-heat .readout")
        expect(of_map).to_have_text(re.compile(r"^Why × If: -?0\.\d{3}"))
        page.keyboard.press("ArrowDown")
        expect(of_map).to_contain_text("is × If")
        terms = page.locator("#match-shared tbody th").all_inner_texts()
        assert terms == ["cold", "boiler", "the", "is"]
        assert save_json(page, "match")[0]["scores"]["colbert"] > 0

        # The browser computes the scores of the service's own late interaction.
        query, passages = map(page.input_value, ("#match-query", "#match-passages"))
        body = {"query": query, "passages": passages.split("\n\n")}
        with ui_server.client() as client:
            ranked = client.post("/rerank", json=body).json()["results"]
        for result in ranked:
            page.locator(".passage", has_text=result["passage"]).click()
            shown = [float(text) for text in page.locator("#match-scores dd").all_inner_texts()]
            wanted = [result["parts"][kind] for kind in ("dense", "sparse", "colbert")]
            assert shown == pytest.approx(wanted, abs=0.002)
        page.fill("#match-query", STRANGE)
        expect(page.locator(".chips")).to_contain_text("strange")
        link = copied(page, "Copy a link").split("#")[1]

    with open_page(browser, ui_server.url, f"ui#{link}") as page:
        expect(page.locator("#match-query")).to_have_value(STRANGE)
        expect(page.locator("#link-bar")).to_contain_text("A link has filled in this view.")
        expect(page).to_have_url(f"{ui_server.url}/ui#match")  # No address keeps the texts.
        page.click("#to-text")
        wait_for_view(page, "text")
        page.click("#to-match")
        expect(page.locator("#match-output")).to_be_hidden()
        page.click("#link-open")
        wait_for_view(page, "match")
        expect(page.locator(".chips")).to_contain_text("strange")
        expect(page.locator("#link-bar")).to_be_hidden()

    markup = quote("<img src=x onerror=alert(1)><script>alert(2)</script>\n\nAnother.")
    strangers = (
        f"ui#search?text={markup}&query=q&embedder={quote('<b>x')}&constructor=1&__proto__=2"
    )
    with open_page(browser, ui_server.url, strangers) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.split("/")[-1]))
        expect(page.locator("#link-bar")).to_contain_text("for <b>x")
        expect(page.locator("#corpus")).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert not {"embeddings", "rerank"} & {*asked}
        page.click("#link-open")
        expect(page.locator("#search-view .column.dense")).to_contain_text("onerror=alert(1)")
        assert page.locator("main img").count() == 0
        for no_link in (
            "constructor",
            "__proto__?texts=a",
            "search?%",
            "?",
            f"text?texts={'x' * 9000}",
        ):
            page.goto(f"{ui_server.url}/ui#{no_link}")
            expect(page.locator("main > section:visible")).to_have_count(1)
        expect(page.locator("#link-text")).to_have_text("The link is too long, so it was not read.")
