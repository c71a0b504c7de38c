"""Search: rankings of the service, passages and files of one's own, formats and models compared."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel

from tests.app.ui.conftest import (
    PHONE,
    PLACES,
    copied,
    findings,
    index,
    lines,
    open_page,
    wait_for_view,
)
from tests.support.encoders import save_family, word_tokenizer
from tests.support.held import full_queue
from tests.support.pictures import data_url, draw_picture, save_image_text, save_picture
from tests.support.server import RunningServer, run_server
from tests.support.wordpiece import save_colbert, save_model, save_splade

pytestmark = pytest.mark.long

KINDS = ["Dense", "Sparse", "ColBERT", "Fused", "Reranked"]
FILES = {
    "notes.md": b"Dropped here.\n\nAnd this, too.",
    "deep/er/page.html": b"<title>Pumps</title><script>document.title = 'run'</script>"
    b"<p>A pump\n hums loudly when it is stuck.</p><p>The second paragraph is this one.</p>",
    "wide.txt": "In UTF-16, but text.".encode("utf-16"),
    f"{'n' * 200}.txt": b"A file with a long name.",
    "paper.pdf": b"%PDF-1.7",
    "deep/picture.png": b"\x89PNG",
    "icon.svg": b"<svg/>",
    ".git/config": b"[core]",
    "latin.txt": "M\u00fcll".encode("latin-1"),
    "empty.txt": b" \n",
    "huge.txt": b"a" * 10_000_001,
}
SKIPPED = re.compile(
    "Skipped 7 of 11 files: 1 PDF .*; 1 neither text, Markdown nor HTML; "
    "1 with a picture, which the embedding model does not read; 1 hidden; "
    "1 larger than 10 MB; 1 not in UTF-8; 1 without text."
)
HTML = {
    "<p>a<p>b <b>bold</b><br>c": "a\n\n\n\nb bold\nc",
    "<script>alert(1)</script><style>p {}</style><img src=x onerror=alert(1)>text": "text",
    "<table><tr><th>A</th>\n <th>B</th></tr>\n<tr><td>1\n</td><td><b>2</b></table>": (
        "| A | B |\n|---|\n| 1 | 2 |"
    ),
    "<table><tr><td>x<table><tr><td>in</table></table>": "| x | in | |",
    "<pre>a\n\nb</pre>": "```\na\n\nb\n```",
}
READ_HTML = """async (html) => {
  const { chosenFiles, readFiles } = await import("/ui/search/files.js");
  const texts = [];
  const files = chosenFiles([new File([html], "a.html")]);
  await readFiles(files, ({ text }) => texts.push(text), () => {}, new AbortController().signal);
  return texts[0].trim();
}"""


PASSAGES = ["A boat needs wind.", 'Bread\'s "flour"\\n\n', "The pump hums. \U0001f600"]
MAKE_PROGRAM = """async (search) => {
  const { searchProgram } = await import("/ui/search/program.js");
  sessionStorage.setItem("smart-embedder-token", "t");
  const code = searchProgram(search);
  sessionStorage.clear();
  return code;
}"""


def search_of(kinds: list[str]) -> dict[str, Any]:
    """A search as the page describes it to the code that one may copy."""
    model = {"model": "smart-embedder-demo"}
    return {
        "query": "Why does the pump make a noise?",
        "passages": PASSAGES,
        "kinds": kinds,
        "options": {"query": model, "documents": model, "scores": None},
        "reranked": 20,
        "shown": 2,
    }


def drop(page, path: Path) -> None:
    """Drop a file or a folder of this machine, as a person does it."""
    client = page.context.new_cdp_session(page)
    page.locator("#drop-zone").scroll_into_view_if_needed()
    box = page.locator("#drop-zone").bounding_box()
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        place = {"type": kind, "x": box["x"] + 20, "y": box["y"] + 20}
        client.send("Input.dispatchDragEvent", {**place, "data": data})


def scores_in(page, column: str) -> list[float]:
    return [float(text) for text in page.locator(f"{column} .hit-head .number").all_inner_texts()]


def test_the_sample_is_ranked_as_the_service_does_it_and_own_files_replace_it(
    open_view: Callable[..., Any], ui_server: RunningServer, tmp_path: Path
) -> None:
    with open_view("search") as page:
        assert [
            text.split("\n")[0] for text in page.locator(".column h3").all_inner_texts()
        ] == KINDS
        names = [
            page.locator(f".column.{kind} .name").first for kind in ("dense", "fused", "reranked")
        ]
        assert {name.inner_text() for name in names} == {"A"}
        ranks = page.locator(".column.dense .rank").all_inner_texts()
        assert ranks == [str(rank) for rank in range(1, 11)]
        # The chosen passage is followed through all columns.
        assert page.locator(".columns .lines path.followed").count() == 4
        expect(page.locator(".column.sparse .hit mark").first).to_have_text("E")
        query, passages = (
            page.input_value("#search-query"),
            page.input_value("#corpus").split("\n\n"),
        )
        with ui_server.client() as client:
            body = {"query": query, "passages": passages}
            ranked = client.post("/rerank", json=body).json()["results"]
        for kind in ("dense", "sparse", "colbert"):
            # The browser has vectors of bytes, the service has float32.
            best = sorted((result["parts"][kind] for result in ranked), reverse=True)
            shown = scores_in(page, f".column.{kind}")
            assert shown == pytest.approx(best[: len(shown)], abs=0.01)

        page.locator(".column.dense .hit", has_text="a fault as a letter").click()
        expect(page.locator("#why-title")).to_have_text("Matching words: passage E")
        expect(page.locator("#why .words")).to_contain_text("The display shows a fault")
        page.locator(".column.dense .hit").first.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(":focus")).to_have_attribute("data-chunk", re.compile(r"\d+"))

        program = [sys.executable, "-W", "error", "-c", copied(page, "Copy as Python")]
        done = subprocess.run(program, capture_output=True, cwd=tmp_path, check=True, text=True)
        column = page.locator(".column.reranked")
        letters = column.locator(".hit .name").all_inner_texts()
        numbers = column.locator(".hit .number").all_inner_texts()
        assert done.stdout.splitlines() == [
            f"{number}  {passages[ord(letter) - ord('A')]}"
            for number, letter in zip(numbers, letters, strict=True)
        ]
        bodies = [
            part.split("\nEND")[0] for part in copied(page, "Copy as curl").split("<<'END'\n")
        ]
        embedded, reranked = map(json.loads, bodies[1:])
        assert embedded["sentences"] == [reranked["query"]] == ["What does error E42 mean?"]
        assert len(reranked["passages"]) == 20

        page.fill("#search-query", "")
        expect(page.locator("#search-hint")).to_contain_text("one of the examples")
        expect(page.locator("#search-output")).to_be_hidden()
        page.click("#search-samples >> text=E42-118")
        expect(page.locator(".column.sparse .name").first).to_have_text("H")
        expect(page.locator("#search-hint")).to_be_hidden()

        for name, content in FILES.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        drop(page, tmp_path)
        state = page.locator("#index-state")
        expect(state).to_contain_text("6 passages in this tab's memory")
        expect(page.locator("#index-left")).to_have_text(SKIPPED)
        expect(page.locator(".column.dense")).to_contain_text("Pumps A pump hums loudly when it is")
        expect(page.locator(".column.dense")).to_contain_text(" · deep/er/page.html")
        expect(page).to_have_title("Search · Smart Embedder")
        reader = page.context.new_page()  # The policy of the page reports the styles.
        reader.goto(f"{ui_server.url}/ui")
        assert {html: reader.evaluate(READ_HTML, html) for html in HTML} == HTML
        code = reader.evaluate(MAKE_PROGRAM, search_of(["dense"]))
        reader.close()
        # The scores are those of the fusion, of one ranking here, as no reranker is named.
        program = [sys.executable, "-c", f"{code}\nprint(search(qdrant, QUERY))"]
        variables = os.environ | {"API_TOKEN": "t"}
        done = subprocess.run(program, capture_output=True, check=True, text=True, env=variables)
        hits = ast.literal_eval(done.stdout.splitlines()[-1])
        assert [score for score, _ in hits] == pytest.approx([3 / 1, 3 / 2])
        assert hits[0][1] == PASSAGES[2]
        # The examples ask about the sample.
        expect(page.locator("#search-samples")).to_be_hidden()
        page.click("#search-output >> text=Copy a link")
        expect(page.locator("#search-output")).to_contain_text("A link cannot contain files")
        index(page, "  \n ")
        expect(page.locator("#index-message")).to_have_text("There is no text to index.")
        expect(state).to_contain_text("6 passages in this tab's memory")
        # The index is lost with the page, which asks before that.
        asked: list[str] = []
        page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
        page.reload()
        wait_for_view(page, "search")
        assert asked == ["beforeunload"]
        expect(state).to_contain_text("26 passages")


def test_an_index_waits_for_a_busy_service_and_ends_with_what_it_has(
    open_view: Callable[..., Any], ui_server: RunningServer, hold: Path
) -> None:
    refused = 'embedding_requests_rejected_total{reason="backpressure"}'
    with open_view("search") as page:
        state, note = page.locator("#index-state"), page.locator("#search-before")
        hits = page.locator(".column.dense .hit")
        with full_queue(ui_server, hold, places=PLACES):
            before = ui_server.metric(refused)
            index(page, lines(60))
            expect(state).to_contain_text("The service is busy: trying again")
            assert ui_server.metric(refused) > before
            # The results of the sample stay meanwhile.
            expect(note).to_be_visible()
            expect(hits.first).to_contain_text("Error E42: the circulation pump")
            page.click("#stop-button")
            expect(state).to_contain_text("26 passages in this tab's memory")
            expect(note).to_be_hidden()
            index(page, lines(40))
            expect(state).to_contain_text("trying again")
        expect(state).to_contain_text("40 passages in this tab's memory")
        expect(page.locator("#index-progress")).to_be_hidden()

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
        page.click("#stop-button")
        expect(state).to_contain_text("8 of 60 passages in this tab's memory")
        expect(hits).to_have_count(8)
        page.unroute_all()

        failure = {"detail": "The model failed.", "code": "inference_failed"}
        asked: list[str] = []

        def fail_first(route) -> None:
            if len(route.request.post_data_json["sentences"]) > 1:
                asked.append(route.request.url)
                if len(asked) == 1:
                    return route.fulfill(status=500, json=failure)
            return route.continue_()

        page.route("**/embeddings", fail_first)
        index(page, lines(200))
        expect(page.locator("#index-message")).to_have_text("The model failed.")
        page.wait_for_event("response", lambda answer: answer.url.endswith("/health"))
        assert len(asked) == 2, "the other request of this index is ended, and none follows"
        page.unroute_all()

        passages = lines(40).split("\n")
        passages[30] = "The keeper of the lighthouse repairs a violin."
        index(page, "\n".join(passages))
        expect(state).to_contain_text("40 passages in this tab's memory")
        page.fill("#search-query", passages[30])
        for kind in ("dense", "colbert", "fused", "reranked"):
            expect(page.locator(f".column.{kind} .name").first).to_have_text("AE")
        expect(page.locator("#why-title")).to_contain_text("passage AE")


def compare(page, **options: str) -> None:
    if page.locator("#compare-button").is_hidden():
        page.click("#compare-panel summary")
    for name, value in options.items():
        page.select_option(f"#compare-{name}", value)
    page.click("#compare-button")


def moves(page, side: str) -> list[tuple[str, str]]:
    """The letter of each passage, and how it has moved."""
    hits = page.locator(f".column.{side} .hit").all()
    return [
        (hit.locator(".name").inner_text(), " ".join(hit.locator(".moved").all_inner_texts()))
        for hit in hits
    ]


def in_bits(vectors: np.ndarray) -> np.ndarray:
    """The vectors' signs, at unit length, as bits tell no length."""
    return np.where(vectors > 0, 1, -1) / np.sqrt(vectors.shape[-1])


def test_formats_are_compared_by_the_vectors_of_the_service(
    open_view: Callable[..., Any], ui_server: RunningServer, hold: Path
) -> None:
    with open_view("search") as page:
        query, passages = (
            page.input_value("#search-query"),
            page.input_value("#corpus").split("\n\n"),
        )
        with ui_server.client() as client:
            answer = client.post("/embeddings", json={"sentences": [query, *passages]}).json()
        vectors = [embedded["embeddings"] for embedded in answer["data"]]
        asked, *dense = (np.array(text["dense"]) for text in vectors)
        tokens, *colbert = (np.array(text["colbert"]) for text in vectors)
        message = page.locator("#compare-message")
        compare(page, format="int8")
        expect(message).to_contain_text("This is the model and number format")
        with full_queue(ui_server, hold, places=PLACES):
            compare(page, format="float16")
            expect(page.locator("#compare-state")).to_contain_text("The service is busy")
            page.click("#compare-stop")
            expect(page.locator("#compare-state")).to_have_text("")
        expect(page.locator("#compare-output")).to_be_hidden()
        compare(page, format="ubinary")
        expect(page.locator(".column.second h3")).to_contain_text("bits")
        sizes = page.locator("#compare-facts tr", has_text="Dense, bytes").locator(".number")
        expect(sizes).to_have_text(["388", "48"])
        scores = in_bits(np.array(dense)) @ asked / np.linalg.norm(asked)
        best = np.sort(scores)[::-1][:10]
        np.testing.assert_allclose(scores_in(page, ".column.second"), best, atol=0.00051)
        page.click("#compare-kinds >> text=ColBERT")
        expect(page.locator(".column.second h3")).to_contain_text("words in context")
        scores = [(tokens @ in_bits(text).T).max(axis=1).mean() for text in colbert]
        best = np.sort(scores)[::-1][:10]
        np.testing.assert_allclose(scores_in(page, ".column.second"), best, atol=0.00051)
        page.click("#compare-kinds >> text=Dense")
        # Weights are the same in each format.
        kinds = page.locator("#compare-kinds button").all_inner_texts()
        assert kinds == ["Dense", "ColBERT", "Fused"]

        expect(page.locator(".column.second .hit")).to_have_count(10)
        first, second = moves(page, "first"), moves(page, "second")
        before = {name: place for place, (name, _) in enumerate(first, start=1)}
        for place, (name, moved) in enumerate(second, start=1):
            was = before.get(name) or int(moved.split()[-1])
            way = "up" if was > place else "down"
            assert moved == ("same" if was == place else f"{way} {abs(was - place)}, was {was}")
        shared = {name for name, _ in first} & {name for name, _ in second}
        still = sum(moved == "same" for _, moved in second)
        told = f"{len(shared)} are in both rankings, {still} at the same place."
        expect(page.locator("#compare-summary")).to_contain_text(told)
        page.locator(".column.second .hit").last.click()
        expect(page.locator("#why-title")).to_contain_text(f"passage {second[-1][0]}")
        with page.expect_download() as download:
            page.click("#search-output >> text=Save as JSON")
        saved = json.loads(Path(download.value.path()).read_text("utf-8"))["result"]["compared"]
        sides = {"smart-embedder-demo, int8": first, "smart-embedder-demo, bits": second}
        for side, hits in sides.items():
            assert [hit["passage"] for hit in saved[side]] == [name for name, _ in hits]

        page.click("#theme")
        page.set_viewport_size(PHONE)
        assert findings(page, {"include": [["#compare-panel"]]}) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.fill("#search-query", "My rooms stay cold")
        expect(page.locator(".column.second .hit").first).to_contain_text("radiators")
        index(page, "A boat needs wind.\n\nBread needs flour.")
        expect(page.locator(".column.dense .hit")).to_have_count(2)
        expect(page.locator("#compare-output")).to_be_hidden()


LABELS = ("contradiction", "entailment", "neutral")
# The one kind of each model, and what the views lack with it.
ALONE = {
    "tiny-dense": ("Dense", "no weight for each word", "no matches between words"),
    "tiny-splade": ("Sparse", "no vector for the whole text", "no dense score"),
    "tiny-colbert": ("ColBERT", "no vector for the whole text", "no list of shared words"),
}


@pytest.fixture(scope="module")
def hold_loading(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, no model of MODELS is loaded."""
    return tmp_path_factory.mktemp("hold") / "loading"


@pytest.fixture(scope="module")
def several(tiny_m3: Path, hold_loading: Path, tmp_path_factory: pytest.TempPathFactory):
    """A server that makes dense vectors where no model is named; it may still be loading."""
    folder = tmp_path_factory.mktemp("several")
    dense = save_family(folder / "tiny-dense", "modernbert", word_tokenizer())
    save_splade(folder / "tiny-splade", BertForMaskedLM)
    save_colbert(folder / "tiny-colbert", BertModel)
    save_model(folder / "tiny-nli", BertForSequenceClassification, id2label=dict(enumerate(LABELS)))
    save_image_text(folder / "tiny-clip", "clip")
    (folder / "other-m3").symlink_to(tiny_m3)
    names = ("tiny-splade", "tiny-colbert", "tiny-clip", "other-m3", "tiny-nli")
    entries = "".join(f"- name: {folder / name}\n" for name in names)
    (folder / "models.yaml").write_text(f"{entries}  task: rerank\n  kind: entailment\n", "utf-8")
    settings = {"EMBEDDING_MODEL": str(dense), "RERANKER_MODEL": "none", "MODELS": "models.yaml"}
    settings["HOLD_LOADING"] = str(hold_loading)
    with run_server(folder, "tests.app.ui.unloading_server", healthy=False, **settings) as server:
        yield server


def choose(page, model: str) -> None:
    page.select_option("#embedder", "" if model == "tiny-dense" else model)


def scores_of(server: RunningServer, model: str, query: str, passages: list[str]) -> np.ndarray:
    """The scores of the service's own vectors in float32."""
    kind = ALONE[model][0].lower()
    body = {"model": model}
    typed = {"input_type": "query"} if kind == "colbert" else {}
    with server.client() as client:
        asked = client.post("/embeddings", json=body | typed | {"sentences": [query]}).json()
        found = client.post("/embeddings", json=body | {"sentences": passages}).json()
    one, *others = (text["embeddings"][kind] for text in asked["data"] + found["data"])
    if kind == "sparse":
        return np.array([sum(w * text.get(t, 0) for t, w in one.items()) for text in others])
    if kind == "colbert":
        return np.array([(np.array(one) @ np.array(text).T).max(axis=1).mean() for text in others])
    return np.array(others) @ one / np.linalg.norm(one) / np.linalg.norm(others, axis=1)


# Each has one colour.
PICTURES = {
    "blue.png": ("image/png", (0, 0, 250)),
    "green.gif": ("image/gif", (0, 250, 0)),
    "red.jpg": ("image/jpeg", (250, 0, 0)),
    "white.webp": ("image/webp", (250, 250, 250)),
}
MIDDLE = """(canvas) => Array.from(
  canvas.getContext("2d").getImageData(canvas.width / 2, canvas.height / 2, 1, 1).data.slice(0, 3)
)"""


def save_drop(folder: Path) -> list[dict[str, str]]:
    """Save `PICTURES`, a damaged one and a text; return the pictures as inputs of the service."""
    for name, (_, colour) in PICTURES.items():
        Image.new("RGB", (50, 40), colour).save(folder / name)
    (folder / "damaged.png").write_bytes(save_picture(draw_picture(50, 40))[:2000])
    (folder / "notes.md").write_text("hybrid search", "utf-8")
    return [
        {"image": data_url((folder / name).read_bytes(), kind)}
        for name, (kind, _) in PICTURES.items()
    ]


def rank_dropped_pictures(page, server: RunningServer, folder: Path) -> None:
    """Search pictures and a text as the service's vectors do, where the model reads pictures."""
    pictures = save_drop(folder)
    query = "Who reads the gas meter?"
    with server.client() as client:
        body = {"model": "tiny-clip", "sentences": [query, *pictures, "hybrid search"]}
        answer = client.post("/embeddings", json=body).json()["data"]
    asked, *vectors = (np.array(item["embeddings"]["dense"]) for item in answer)
    cosines = [asked @ one / np.linalg.norm(asked) / np.linalg.norm(one) for one in vectors]
    ranked = sorted(zip(cosines, [*PICTURES, "notes.md"], strict=True), reverse=True)

    choose(page, "tiny-clip")
    expect(page.locator("#search-lead")).to_contain_text("tiny-clip makes only dense vectors")
    drop(page, folder)
    expect(page.locator("#index-state")).to_contain_text("5 of 6 passages in this tab's memory")
    expect(page.locator("#index-left")).to_have_text(
        "The service refused 1 picture. damaged.png: The input at index 0: the picture's file is "
        "damaged: image file is truncated."
    )
    hits = page.locator(".column.dense .hit")
    expect(hits).to_have_count(5)
    expect(page.locator(".column.reranked")).to_contain_text("Tiny-nli reads no pictures")
    names = [text.split(" · ")[1] for text in hits.locator(".name").all_inner_texts()]
    assert names == [name for _, name in ranked]
    shown = scores_in(page, ".column.dense")
    np.testing.assert_allclose(shown, [score for score, _ in ranked], atol=0.02)
    for name, (_, colour) in PICTURES.items():
        thumbnail = hits.filter(has_text=name).locator("canvas")
        expect(thumbnail).to_have_attribute("height", "116")
        np.testing.assert_allclose(thumbnail.evaluate(MIDDLE), colour, atol=6)
    hits.filter(has_text="red.jpg").click()
    expect(page.locator("#why-title")).to_contain_text("Picture: passage")
    expect(page.locator("#why canvas")).to_have_attribute("height", "360")
    assert findings(page) == []
    choose(page, "tiny-dense")
    expect(page.locator("#index-left")).to_have_text(
        "Skipped 5 of 6 files: 5 with a picture, which the embedding model does not read."
    )
    expect(hits).to_have_count(1)


def test_each_view_follows_the_model_that_is_chosen_and_waits_until_it_is_loaded(
    browser, several: RunningServer, hold_loading: Path, tmp_path: Path
) -> None:
    with open_page(browser, several.url) as page:
        # Opened while the models are loading, it goes on by itself.
        expect(page.locator("#text-kinds tr")).to_have_count(1)
        expect(page.locator("#text-message")).to_be_hidden()
        for model, (kind, lost_in_text, lost_in_match) in ALONE.items():
            page.click("#to-text")
            choose(page, model)
            expect(page.locator("#text-kinds th")).to_contain_text([kind])
            expect(page.locator("#text-lead")).to_contain_text(f"{model} makes")
            expect(page.locator("#text-lead")).to_contain_text(lost_in_text)
            page.click("#to-match")
            expect(page.locator("#match-lead")).to_contain_text(lost_in_match)
            expect(page.locator("#match-scores dt")).to_have_count(1)
            for part, owner in {"ribbon": "ColBERT", "heat": "ColBERT", "shared": "Sparse"}.items():
                expect(page.locator(f"#match-{part}-part")).to_be_visible(visible=kind == owner)
            page.click("#to-search")
            column = f".column.{kind.lower()}"
            page.wait_for_selector(f"{column} .hit")
            expect(page.locator("#search-before")).to_be_hidden()
            expect(page.locator(".column")).to_have_count(2)
            expect(page.locator(".column.reranked .hit").first).to_be_visible()
            query, corpus = page.input_value("#search-query"), page.input_value("#corpus")
            scores = np.sort(scores_of(several, model, query, corpus.split("\n\n")))[::-1]
            shown = scores_in(page, column)
            # Dense and ColBERT vectors are bytes in the browser.
            np.testing.assert_allclose(shown, scores[: len(shown)], atol=0.02)
        page.reload()
        expect(page.locator("#embedder")).to_have_value("tiny-colbert")
        assert findings(page) == []

        page.wait_for_selector(".column.colbert .hit")
        hold_loading.touch()
        choose(page, "other-m3")
        # The vectors of one model are not searched by another's.
        expect(page.locator("#search-before")).to_be_visible()
        expect(page.locator("#model-state")).to_have_text("other-m3 is being loaded.")
        expect(page.locator("#embedder option:checked")).to_contain_text("(being loaded)")
        hold_loading.unlink()
        expect(page.locator(".column")).to_have_count(5)
        expect(page.locator("#search-before")).to_be_hidden()
        with several.client() as client:
            assert client.post("/test/unload/other-m3").status_code == 200
        page.fill("#search-query", "Who reads the gas meter?")
        several.wait_for_metric('embedder_model_loads_total{model="other-m3",result="success"}', 2)
        expect(page.locator("#why-title")).to_contain_text("passage ")

        choose(page, "tiny-dense")
        expect(page.locator(".column")).to_have_count(2)
        compare(page, model="tiny-splade", format="float32")
        expect(page.locator(".column.second h3")).to_contain_text("tiny-splade, float32")
        # The models have no kind in common: each has all of its own.
        assert page.locator("#compare-kinds button").all_inner_texts() == ["Fused"]
        rows = page.locator("#compare-facts tbody tr").all_inner_texts()
        assert [row.split("\t").index("–") for row in rows[:2]] == [2, 1]
        rank_dropped_pictures(page, several, tmp_path)
        choose(page, "tiny-splade")
        expect(page.locator(".column.sparse .hit").first).to_be_visible()
        page.click("#compare-button")
        expect(page.locator("#compare-message")).to_contain_text("are float32 in every format")
        page.evaluate("sessionStorage.setItem('smart-embedder-embedder', 'gone-since')")
        page.goto(f"{several.url}/ui#service")
        page.reload()
        expect(page.locator("#embedder")).to_have_value("")
        row = page.locator("#served tbody tr", has_text="tiny-dense")
        expect(row).to_have_text(re.compile("embed.*ready.*dense"))
