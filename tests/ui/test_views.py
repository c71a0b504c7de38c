"""The four views in a browser, with the demo model: what they show, and that axe finds nothing."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.server import RunningServer
from tests.ui.conftest import PHONE, STILL, VIEWS, findings, open_page, wait_for_view

pytestmark = pytest.mark.long


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def test_text_shades_the_words_that_the_model_weighs(shown) -> None:
    page = shown("text")
    shares = dict(
        page.eval_on_selector_all(
            ".token",
            "all => all.map((each) => [each.textContent, +each.style.getPropertyValue('--share')])",
        )
    )
    assert shares["boiler"] > 0.5
    assert shares["the"] < 0.3
    row = page.locator(".weights .rest tr", has_text="the")
    # Counted most, and weighed little.
    assert row.locator(".number").all_text_contents()[1] == "9"


def test_text_follows_what_is_typed_and_takes_several_texts(open_view) -> None:
    page = open_view("text")
    page.fill("#texts", "A first text.\n\nAnd the second one.")
    expect(page.locator(".text-result")).to_have_count(2)
    expect(page.locator("#text-count")).to_contain_text("2 texts")
    expect(page.locator("#text-kinds tr").first).to_contain_text("2 vectors of 384")
    page.fill("#texts", "")
    expect(page.locator("#text-output")).to_be_hidden()


def test_text_shows_where_the_model_stops_reading(open_view) -> None:
    page = open_view("text")
    page.click("text=Too long for the model")
    page.check("#text-pieces")
    expect(page.locator(".cut-mark")).to_have_text("The model stops reading here, after 512 tokens")
    read = page.locator(".token:not(.cut)").count()
    # A token that is a space alone has no place in the text.
    assert 450 < read <= 512 - 2
    expect(page.locator(".facts")).to_contain_text("cut off")


def test_text_tells_the_sizes_and_times_of_the_three_kinds(shown) -> None:
    page = shown("text")
    rows = page.locator("#text-kinds tr").all()
    assert [row.locator("th").inner_text().split("\n")[0] for row in rows] == [
        "Dense",
        "Sparse",
        "ColBERT",
        "All three",
    ]
    assert rows[0].locator("td").nth(1).inner_text() == "1.54 KB"
    # Which numbers and when, the next test says.
    for row in rows:
        assert re.fullmatch(r"[\d.,]+ m?s|–", row.locator("td").last.inner_text())


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


FREE = {"queue": 0.0, "inference": 5.0}


def forwards(*inference: float, queue: float = 0) -> list[dict[str, float]]:
    return [{"queue": queue, "inference": time} for time in inference]


# After the first request, those of all kinds together, dense, sparse and ColBERT, and so on.
@pytest.mark.parametrize(
    ("timed", "shown"),
    [
        (forwards(9, 6, 4, 5, 8, 7, 3, 6), ["6.0 ms", "3.0 ms", "5.0 ms", "8.0 ms"]),
        # Noise in the first rounds.
        (forwards(*[9, 12, 4, 5] * 2, 9, 8, 4, 5), ["8.0 ms", "4.0 ms", "5.0 ms", "9.0 ms"]),
        (forwards(*[9, 12, 4, 5] * 4), ["–"] * 4),
        (forwards(9, 6, queue=0) + forwards(4, queue=21), ["–"] * 4),
        # From a cache.
        (forwards(0), ["–"] * 4),
    ],
)
def test_text_tells_the_best_time_of_each_kind_or_none(
    browser, ui_server: RunningServer, timed: list[dict[str, float]], shown: list[str]
) -> None:
    with open_page(browser, ui_server.url, "text") as page:
        wait_for_view(page, "text")
        answer_with_times(page, [FREE, *timed])
        page.fill("#texts", "A text with times of its own.")
        expect(page.locator("#text-results")).to_contain_text("times")
        cells = page.locator("#text-kinds td:last-child")
        expect(cells).to_have_text(shown)
        page.unroute_all()


def test_text_tells_numbers_by_pointer_and_keyboard(shown) -> None:
    page = shown("text")
    readout = page.locator(".text-result .readout")
    page.locator(".token", has_text="pump").first.hover()
    expect(readout).to_contain_text("pump: weight 0.")
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("boiler: weight 0.")
    page.keyboard.press("End")
    expect(page.locator(":focus")).to_have_text(".")


def test_match_draws_the_best_match_of_each_query_token(shown) -> None:
    page = shown("match")
    chips = page.locator(".chip")
    expect(page.locator(".ribbon .lines path")).to_have_count(chips.count())
    chips.filter(has_text="boiler").hover()
    readout = page.locator("#match-ribbon .readout")
    expect(readout).to_contain_text("boiler best matches boiler, similarity 0.")
    chips.filter(has_text="boiler").focus()
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("cold best matches cold")


def test_match_folds_special_tokens_until_tokens_are_shown(shown) -> None:
    page = shown("match")
    chips, rows = page.locator(".chip"), page.locator("#match-table tbody th")
    expect(chips.last).to_have_text("?")
    expect(rows.last).to_have_text("special tokens")
    page.check("#match-pieces")
    expect(chips.last).to_have_text("</s>")
    page.uncheck("#match-pieces")
    expect(chips.last).to_have_text("?")


def test_match_tells_every_number_of_the_heat_map_to_the_keyboard(shown) -> None:
    page = shown("match")
    page.locator(".heat").focus()
    page.keyboard.press("ArrowRight")
    readout = page.locator("#match-heat .readout")
    expect(readout).to_have_text(re.compile(r"^Why × If: -?0\.\d{3}"))
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text("is × If")


def test_match_agrees_with_the_service(open_view, ui_server: RunningServer) -> None:
    """The scores that the browser computes are those of the service's own late interaction."""
    page = open_view("match")
    query, passages = (
        page.input_value("#match-query"),
        page.input_value("#match-passages").split("\n\n"),
    )
    with ui_server.client() as client:
        ranked = client.post("/rerank", json={"query": query, "passages": passages}).json()[
            "results"
        ]
    parts = {each["passage"]: each["parts"] for each in ranked}
    for button in page.locator(".passage").all():
        button.click()
        wanted = parts[button.locator(".passage-text").inner_text()]
        shown = [float(text) for text in page.locator("#match-scores dd").all_inner_texts()]
        assert shown == pytest.approx(
            [wanted[kind] for kind in ("dense", "sparse", "colbert")], abs=0.002
        )


def test_match_lists_the_words_that_both_share(shown) -> None:
    page = shown("match")
    terms = page.locator("#match-shared tbody th").all_inner_texts()
    assert terms == ["cold", "boiler", "the", "is"]


def test_search_shows_how_passages_move_between_rankings(shown) -> None:
    page = shown("search")
    names = [text.split("\n")[0] for text in page.locator(".column h3").all_inner_texts()]
    assert names == ["Dense", "Sparse", "ColBERT", "Fused", "Reranked"]
    first = {
        kind: page.locator(f".column.{kind} .name").first.inner_text()
        for kind in ("dense", "colbert", "fused", "reranked")
    }
    assert set(first.values()) == {"A"}
    ranks = page.locator(".column.dense .rank").all_inner_texts()
    assert ranks == [str(rank) for rank in range(1, 11)]
    lines = page.locator(".columns .lines path")
    assert lines.count() > 20
    # The chosen passage is followed through all columns.
    assert page.locator(".columns .lines path.followed").count() == 4
    expect(page.locator(".column.sparse .hit").first.locator("mark").first).to_have_text("E")


def test_search_ranks_as_the_service_itself_does(shown, ui_server: RunningServer) -> None:
    """The demo's reranker is late interaction, whose parts are the scores of the columns."""
    page = shown("search")
    query, passages = page.input_value("#search-query"), page.input_value("#corpus").split("\n\n")
    with ui_server.client() as client:
        ranked = client.post("/rerank", json={"query": query, "passages": passages}).json()[
            "results"
        ]
    for kind in ("dense", "sparse", "colbert"):
        best = sorted((each["parts"][kind] for each in ranked if each["parts"][kind]), reverse=True)
        shown = [
            float(text)
            for text in page.locator(f".column.{kind} .hit-head .number").all_inner_texts()
        ]
        # Vectors of bytes in the browser, and of float32 in the service.
        assert shown == pytest.approx(best[: len(shown)], abs=0.01)


def test_search_explains_the_passage_that_is_chosen(open_view) -> None:
    page = open_view("search")
    page.locator(".column.dense .hit", has_text="a fault as a letter").click()
    expect(page.locator("#why-title")).to_have_text("Matching words: passage E")
    expect(page.locator("#why .words")).to_contain_text("The display shows a fault")
    page.locator(".column.dense .hit").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.locator(":focus")).to_have_attribute("data-chunk", re.compile(r"\d+"))


def test_search_offers_queries_and_says_what_to_do_without_one(open_view) -> None:
    page = open_view("search")
    page.fill("#search-query", "")
    expect(page.locator("#search-hint")).to_be_visible()
    expect(page.locator("#search-output")).to_be_hidden()
    expect(page.locator("#search-hint")).to_contain_text("one of the examples")
    page.click("#search-samples >> text=E42-118")
    expect(page.locator(".column.sparse .name").first).to_have_text("H")
    expect(page.locator("#search-hint")).to_be_hidden()


def test_search_offers_no_queries_of_its_own_for_a_text_of_yours(open_view) -> None:
    page = open_view("search")
    page.fill("#search-query", "")
    page.click("#drop-zone summary")
    page.fill("#corpus", "A violin needs strings.")
    page.click("#index-button")
    expect(page.locator("#search-samples")).to_be_hidden()
    expect(page.locator("#search-hint")).to_be_visible()
    assert "examples" not in page.inner_text("#search-hint")


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_search_shows_ranks_and_texts_at_every_width(open_view, width: int) -> None:
    page = open_view("search", viewport={"width": width, "height": 900})
    for part in (".rank", ".snippet"):
        expect(page.locator(f".column.reranked {part}").first).to_be_visible()
    assert page.locator(".column.dense .snippet").first.bounding_box()["width"] > 150


def drop(page, path: Path) -> None:
    """Drop a file or a folder of this machine, as a person does it."""
    client = page.context.new_cdp_session(page)
    box = page.locator("#drop-zone").bounding_box()
    what = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        place = {"type": kind, "x": box["x"] + 20, "y": box["y"] + 20}
        client.send("Input.dispatchDragEvent", {**place, "data": what})


def test_search_takes_files_and_another_query(open_view, tmp_path: Path) -> None:
    file = tmp_path / "bread.txt"
    file.write_text("Bread needs flour and time.\n\nThe oven must be hot.\n\nA boat needs wind.\n")
    page = open_view("search")
    page.click("#drop-zone summary")
    page.set_input_files("#corpus-files", file)
    expect(page.locator("#index-state")).to_contain_text("3 passages in this tab's memory")
    # The panel makes room for the results, and queries for the handbook have no meaning now.
    expect(page.locator("#corpus")).to_be_hidden()
    expect(page.locator("#search-samples")).to_be_hidden()
    page.fill("#search-query", "baking")
    expect(page.locator(".column.reranked .hit")).to_have_count(3)
    expect(page.locator(".column.dense .hit").first).not_to_contain_text("boat")
    expect(page.locator(".column.dense .name").first).to_contain_text(" · bread.txt")
    # The index is lost with the page, which asks before that.
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
    page.reload()
    wait_for_view(page, "search")
    assert asked == ["beforeunload"]
    expect(page.locator("#index-state")).to_contain_text("26 passages")


def test_search_takes_a_folder_that_is_dropped_and_tells_what_it_leaves_out(
    open_view, tmp_path: Path
) -> None:
    files = {
        "notes.md": b"Dropped here.\n\nAnd this, too.",
        "deep/er/page.html": b"<title>Pumps</title><script>document.title = 'run'</script>"
        b"<p>A pump\n hums loudly when it is stuck.</p><p>The second paragraph is this one.</p>",
        "wide.txt": "In UTF-16, but text.".encode("utf-16"),
        f"{'n' * 200}.txt": b"A file with a long name.",
        "paper.pdf": b"%PDF-1.7",
        "deep/picture.png": b"\x89PNG",
        ".git/config": b"[core]",
        "latin.txt": "M\u00fcll".encode("latin-1"),
        "empty.txt": b" \n",
        "huge.txt": b"a" * 10_000_001,
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    page = open_view("search")
    drop(page, tmp_path)
    expect(page.locator("#index-state")).to_contain_text("6 passages in this tab's memory")
    left = page.locator("#index-left")
    expect(left).to_have_text(
        re.compile(
            "Skipped 6 of 10 files: 1 PDF .*; 1 neither text, Markdown nor HTML; 1 hidden; "
            "1 larger than 10 MB; 1 not in UTF-8; 1 without text."
        )
    )
    expect(page.locator(".column.dense")).to_contain_text("Pumps A pump hums loudly when it is")
    expect(page.locator(".column.dense")).to_contain_text(" · deep/er/page.html")
    expect(page).to_have_title("Search · Smart Embedder")
    drop(page, tmp_path / "paper.pdf")
    expect(left).to_contain_text("Skipped 1 of 1 file: 1 PDF (convert it to text first")
    expect(page.locator("#index-message")).to_have_text("There is no text to index.")
    expect(page.locator("#index-state")).to_contain_text("6 passages in this tab's memory")
    expect(page.locator(".column.dense")).to_contain_text("Pumps A pump hums")


def test_service_counts_what_happens_and_names_what_runs(open_view, ui_server) -> None:
    page = open_view("service")
    expect(page.locator("#service-state")).to_have_text("healthy")
    expect(page.locator("#facts")).to_contain_text("512 tokens")
    expect(page.locator("#models")).to_contain_text("attention")
    assert page.locator(".chart").count() == 8
    tokens = page.locator("#chart-tokens .figure-note")
    expect(tokens).to_contain_text(re.compile(r"\d"))  # The first figures take a moment.
    before = number(tokens.inner_text())
    with ui_server.client() as client:
        client.post("/embeddings", json={"sentences": ["a b c"]})
    expect(tokens).not_to_have_text(re.compile(f"^{before:,.0f} since"))
    expect(page.locator("#chart-memory .figure-number")).to_contain_text(re.compile("[MG]B"))
    expect(page.locator("#chart-latency svg")).to_have_attribute(
        "aria-label", re.compile(r"highest [\d.,]+ m?s")
    )


def test_a_chart_has_times_and_a_scale_and_is_read_by_pointer_and_keys(open_view) -> None:
    page = open_view("service")
    chart = page.locator("#chart-memory")
    drawing, note = chart.locator("svg"), chart.locator(".figure-note")
    three = re.compile(r"^\S+ \S+ \S+")
    expect(chart.locator("polyline")).to_have_attribute("points", three)
    scale, times = ["0", r"[\d.]+ [MG]B", r"[\d.]+ [MG]B", ""], [r"\d\d:\d\d:\d\d"] * 3
    expect(chart.locator("text")).to_have_text([re.compile(f"^{each}$") for each in scale + times])
    expect(page.locator("#chart-queue text").nth(3)).to_have_text("requests")
    first, _, last = chart.locator("text").all_text_contents()[4:]
    assert page.locator("#charts-since").text_content().startswith(f"Since {first}, ")

    size = drawing.bounding_box()
    drawing.hover(position={"x": size["width"] - 10, "y": 60})
    expect(chart.locator(".mark")).to_have_count(1)
    expect(note).to_have_text(re.compile(r"^\d\d:\d\d:\d\d: [\d.]+ [MG]B$"))
    assert note.text_content().split(": ")[0] >= last
    page.mouse.move(0, 0)
    expect(note).to_have_text("no GPU in use")

    drawing.press("Home")
    expect(note).to_contain_text(f"{first}: ")
    drawing.press("ArrowRight")
    expect(note).not_to_contain_text(f"{first}: ")
    expect(drawing).to_have_attribute("aria-valuenow", "1")
    expect(drawing).to_have_attribute("aria-valuetext", note.text_content())
    drawing.press("ArrowLeft")
    expect(note).to_contain_text(f"{first}: ")
    drawing.press("End")
    expect(note).not_to_contain_text(f"{first}: ")
    drawing.blur()
    expect(note).to_have_text("no GPU in use")


def test_nothing_is_drawn_before_there_are_two_points(browser, ui_server: RunningServer) -> None:
    with open_page(browser, ui_server.url, "service", own_clock=True) as page:
        page.clock.install()
        page.reload()
        wait_for_view(page, "service")
        numbers, drawn = page.locator(".figure-number"), page.locator(".chart svg > *")
        expect(page.locator("#totals")).to_contain_text("requests")
        expect(numbers).to_have_text(["…"] * 8)
        with page.expect_response("**/metrics"):
            page.clock.run_for(4000)
        expect(page.locator("#chart-queue .figure-number")).to_have_text("0")
        assert drawn.count() == 0
        expect(page.locator("#charts-since")).to_have_text("The charts begin in a few seconds.")
        with page.expect_response("**/metrics"):
            page.clock.run_for(4000)
        expect(page.locator("#chart-queue polyline")).to_have_count(1)


def test_the_api_folds_its_limits_above_its_operations(browser, ui_server: RunningServer) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto(f"{ui_server.url}/docs")
    page.wait_for_selector(".opblock-tag")
    limits, operations = page.locator(".info__description"), page.locator(".opblock-tag").last
    assert limits.bounding_box()["y"] < operations.bounding_box()["y"]
    expect(limits.locator("details")).not_to_have_attribute("open", "")
    expect(limits).to_contain_text("16 MiB")
    expect(limits).to_contain_text("1,024; at least 2,048")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.close()


def test_no_word_of_the_service_is_cut_apart_on_a_phone(open_view) -> None:
    page = open_view("service", viewport=PHONE)
    # Each of the headings is one word, on one line.
    assert page.locator("#served thead tr").bounding_box()["height"] < 40


def test_polling_pauses_while_the_tab_is_hidden(browser, ui_server: RunningServer) -> None:
    with open_page(browser, ui_server.url, "service", own_clock=True) as page:
        page.clock.install()
        page.reload()
        wait_for_view(page, "service")
        # The page's first requests.
        page.wait_for_load_state("networkidle")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        hidden = "Object.defineProperty(document, 'hidden', {configurable: true, value: %s});"
        page.evaluate(f"{hidden % 'true'} document.dispatchEvent(new Event('visibilitychange'))")
        page.clock.run_for(60_000)
        while_hidden = list(asked)
        with page.expect_request("**/metrics"):
            page.evaluate(
                f"{hidden % 'false'} document.dispatchEvent(new Event('visibilitychange'))"
            )
        assert while_hidden == []


def test_nothing_is_wider_than_a_phone(open_view) -> None:
    page = open_view(VIEWS[0], viewport=PHONE, has_touch=True, is_mobile=True)
    for view in VIEWS:
        page.click(f"#to-{view}")
        wait_for_view(page, view)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], view


def test_the_theme_follows_the_system_until_it_is_switched(open_view) -> None:
    page = open_view("text", media={"color_scheme": "dark"})
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.click("#theme")
    light = page.evaluate(paper)
    assert light != dark
    page.reload()
    assert page.evaluate(paper) == light
    page.click("#theme")
    assert page.evaluate(paper) == dark
    page.emulate_media(color_scheme="light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_nothing_moves_for_those_who_want_that(open_view) -> None:
    page = open_view("match", media=STILL)
    seconds = "all => all.map((each) => parseFloat(getComputedStyle(each).transitionDuration))"
    assert set(page.eval_on_selector_all("*", seconds)) == {0}


def test_views_have_addresses_and_the_keyboard_reaches_them(open_view) -> None:
    page = open_view("text")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#match-title")).to_be_focused()
    expect(page).to_have_title("Match · Smart Embedder")
    page.go_back()
    expect(page.locator("#text-view")).to_be_visible()


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
    page.click("text=Too long for the model")
    page.check("#text-pieces")
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
