"""Extract: spans marked in the texts, for servers with a model that finds them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.app.ui.conftest import DESKTOP, PHONE, copied, findings, open_page
from tests.support.classifiers import DEBERTA, save_gliner2, save_token_classifier
from tests.support.server import RunningServer, run_server

pytestmark = pytest.mark.long
TEXTS = "hybrid 😀 search of <b>vector</b> memory\n\nbread"


@pytest.fixture(scope="module")
def extract_server(tiny_m3: Path, tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("extract")
    classifier = save_token_classifier(folder / "tiny-ner", "Bert")
    (folder / "models.yaml").write_text(f"- name: {classifier}\n  task: extract\n", "utf-8")
    models = {"EMBEDDING_MODEL": str(tiny_m3), "MODELS": str(folder / "models.yaml")}
    with run_server(folder, **models) as running:
        yield running


def test_spans_are_marked_where_the_service_finds_them(browser, extract_server) -> None:
    with open_page(browser, extract_server.url, "ui#text") as page:
        page.click("#to-extract")
        expect(page.locator("#extract-count")).to_contain_text("tokens read.")
        page.fill("#extract-threshold", "0.2")
        page.fill("#extract-texts", TEXTS)
        expect(page.locator(".marked")).to_have_count(2)
        texts = TEXTS.split("\n\n")
        with extract_server.client() as client:
            body = {"texts": texts, "threshold": 0.2}
            rows = client.post("/extract", json=body).json()["data"]
        spans = [span for row in rows for span in row["spans"]]
        assert len(spans) > 5
        marks = page.locator(".marked mark")
        expect(marks).to_have_count(len(spans))
        shown = [f"{span['text']} {span['label']}" for span in spans]
        assert marks.all_text_contents() == shown
        cells = page.locator("#extract-spans td.number").all_text_contents()
        assert cells == [f"{span['score']:.3f}" for span in spans]
        assert page.locator(".marked b").count() == 0
        page.evaluate("document.querySelectorAll('.marked small').forEach((name) => name.remove())")
        assert page.locator(".marked").all_text_contents() == texts
        for theme, viewport in {"light": DESKTOP, "dark": PHONE}.items():
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size(viewport)
            assert findings(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        program = copied(page, "Copy as JavaScript")
        assert json.dumps(texts[1]) in program
        link = copied(page, "Copy a link").split("#")[1]
        page.fill("#extract-threshold", "1")
        page.locator("#extract-threshold").blur()
        expect(page.locator("#extract-count")).to_contain_text("0 spans")
        page.fill("#extract-texts", "")
        expect(page.locator("#extract-output")).to_be_hidden()
    with open_page(browser, extract_server.url, f"ui#{link}") as page:
        expect(page.locator("#extract-threshold")).to_have_value("0.2")
        page.click("#link-open")
        expect(page.locator(".marked mark")).to_have_count(len(spans))


def test_labels_are_typed_for_a_model_that_reads_them(browser, tiny_m3: Path, tmp_path) -> None:
    pytest.importorskip("gliner2", reason="needs the extra gliner2")
    folders = (
        save_token_classifier(tmp_path / "tiny-ner", "Bert"),
        save_gliner2(tmp_path / "tiny-gliner2", **DEBERTA),
    )
    models = tmp_path / "models.yaml"
    models.write_text("".join(f"- name: {x}\n  task: extract\n" for x in folders), "utf-8")
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "MODELS": str(models)}
    with (
        run_server(tmp_path, **settings) as server,
        open_page(browser, server.url, "ui#extract") as page,
    ):
        expect(page.locator("#extract-count")).to_contain_text("tokens read.")
        expect(page.locator("#extract-labels")).to_be_hidden()
        page.fill("#extract-threshold", "0.05")
        page.fill("#extract-texts", TEXTS)
        page.select_option("#extractor", "tiny-gliner2")
        page.fill("#extract-labels", " sea side, , rank ")
        body = {"model": "tiny-gliner2", "labels": ["sea side", "rank"], "threshold": 0.05}
        with server.client() as client:
            rows = client.post("/extract", json=body | {"texts": TEXTS.split("\n\n")}).json()[
                "data"
            ]
        spans = [span for row in rows for span in row["spans"]]
        assert {span["label"] for span in spans} == {"sea side", "rank"}
        names = page.locator(".marked small")
        expect(names).to_have_text([span["label"] for span in spans])
        assert '"sea side"' in copied(page, "Copy as Python")
        assert findings(page) == []
        names.evaluate_all("(names) => names.forEach((name) => name.remove())")
        assert page.locator(".marked").all_text_contents() == TEXTS.split("\n\n")
        page.fill("#extract-labels", "")
        expect(page.locator("#extract-message")).to_contain_text("labels is required for")
        page.select_option("#extractor", "tiny-ner")
        expect(page.locator("#extract-labels")).to_be_hidden()
        expect(page.locator("#extract-message")).to_be_hidden()


def test_a_server_without_such_a_model_has_no_view_for_it(open_view, ui_server) -> None:
    with open_view("text") as page:
        expect(page.locator("#to-extract")).to_be_hidden()
        page.goto(f"{ui_server.url}/ui#extract")
        expect(page.locator("#extract-none")).to_be_visible()
