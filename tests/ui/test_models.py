"""Models that make one kind of vectors, and several models to choose from."""

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel

from tests.support.encoders import save_family, word_tokenizer
from tests.support.server import RunningServer, run_server
from tests.support.wordpiece import save_colbert, save_model, save_splade
from tests.ui.conftest import STILL, findings, open_page, wait_for_view

pytestmark = pytest.mark.long

LABELS = ("contradiction", "entailment", "neutral")
# What each makes, and what the views lack with it.
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
    (folder / "other-m3").symlink_to(tiny_m3)
    names = ("tiny-splade", "tiny-colbert", "other-m3", "tiny-nli")
    entries = "".join(f"- name: {folder / name}\n" for name in names)
    (folder / "models.yaml").write_text(f"{entries}  task: rerank\n", "utf-8")
    settings = {"EMBEDDING_MODEL": str(dense), "RERANKER_MODEL": "none", "MODELS": "models.yaml"}
    settings["HOLD_LOADING"] = str(hold_loading)
    with run_server(folder, "tests.ui.unloading_server", healthy=False, **settings) as server:
        yield server


def choose(page, model: str) -> None:
    page.select_option("#embedder", "" if model == "tiny-dense" else model)


def headings(page) -> list[str]:
    return [text.split("\n")[0] for text in page.locator(".column h3").all_inner_texts()]


def scores_of(server: RunningServer, model: str, query: str, passages: list[str]) -> np.ndarray:
    """The scores of the service's own vectors in float32."""
    with server.client() as client:

        def embed(texts: list[str], **options) -> list[dict]:
            body = {"sentences": texts, "model": model} | options
            return [
                each["embeddings"] for each in client.post("/embeddings", json=body).json()["data"]
            ]

        typed = {"input_type": "query"} if model == "tiny-colbert" else {}
        (asked,), found = embed([query], **typed), embed(passages)
    if asked["dense"]:
        one, others = np.array(asked["dense"]), np.array([each["dense"] for each in found])
        return others @ one / np.linalg.norm(one) / np.linalg.norm(others, axis=1)
    if asked["sparse"]:
        weights = asked["sparse"]
        return np.array(
            [sum(w * each["sparse"].get(t, 0) for t, w in weights.items()) for each in found]
        )
    matches = (np.array(asked["colbert"]) @ np.array(each["colbert"]).T for each in found)
    return np.array([match.max(axis=1).mean() for match in matches])


def test_a_page_that_is_opened_while_models_are_loading_goes_on_by_itself(
    browser, several: RunningServer
) -> None:
    with open_page(browser, several.url) as page:
        wait_for = page.locator("#text-kinds tr")
        expect(wait_for).to_have_count(1)
        expect(page.locator("#text-message")).to_be_hidden()
        expect(page.locator("#model-state")).to_have_text("It makes dense vectors.")


@pytest.mark.parametrize("model", ALONE)
def test_each_view_holds_for_a_model_with_one_kind_of_vectors(
    browser, several: RunningServer, model: str
) -> None:
    kind, lost_in_text, lost_in_match = ALONE[model]
    several.wait_until_healthy()
    with open_page(browser, several.url, "text") as page:
        choose(page, model)
        expect(page.locator("#text-kinds th")).to_contain_text([kind])
        expect(page.locator("#text-lead")).to_contain_text(f"{model} makes")
        expect(page.locator("#text-lead")).to_contain_text(lost_in_text)
        assert (page.locator(".token.plain").count() > 0) == (kind != "Sparse")
        page.click("#to-match")
        expect(page.locator("#match-lead")).to_contain_text(lost_in_match)
        expect(page.locator("#match-scores dt")).to_have_count(1)
        for part, of in {"ribbon": "ColBERT", "heat": "ColBERT", "shared": "Sparse"}.items():
            expect(page.locator(f"#match-{part}-part")).to_be_visible(visible=kind == of)
        page.click("#to-search")
        page.wait_for_selector("#why > *")
        assert headings(page) == [kind, "Reranked"]
        passages = page.input_value("#corpus").split("\n\n")
        scores = scores_of(several, model, page.input_value("#search-query"), passages)
        column = f".column.{kind.lower()}"
        shown = page.locator(f"{column} .hit-head .number").all_inner_texts()
        best = np.sort(scores)[::-1][: len(shown)]
        # Dense and ColBERT vectors are bytes in the browser.
        np.testing.assert_allclose([float(each) for each in shown], best, atol=0.02)


def test_an_index_is_made_anew_by_the_model_that_is_chosen(
    browser, several: RunningServer, hold_loading: Path
) -> None:
    several.wait_until_healthy()
    with open_page(browser, several.url, "search") as page:
        page.wait_for_selector("#why > *")
        hold_loading.touch()
        choose(page, "other-m3")
        # The vectors of one model are not searched by another's.
        expect(page.locator("#search-before")).to_be_visible()
        assert headings(page) == ["Dense", "Reranked"]
        expect(page.locator("#model-state")).to_have_text("other-m3 is being loaded.")
        expect(page.locator("#embedder option:checked")).to_contain_text("(being loaded)")
        hold_loading.unlink()
        expect(page.locator(".column")).to_have_count(5)
        assert headings(page) == ["Dense", "Sparse", "ColBERT", "Fused", "Reranked"]
        expect(page.locator("#search-before")).to_be_hidden()
        expect(page.locator("#search-lead")).to_contain_text("Each kind of vector")
        with several.client() as client:
            assert client.post("/test/unload/other-m3").status_code == 200
        page.fill("#search-query", "Who reads the gas meter?")
        several.wait_for_metric('embedder_model_loads_total{model="other-m3",result="success"}', 2)
        expect(page.locator("#why-title")).to_contain_text("passage ")
        expect(page.locator("#model-state")).to_have_text(
            "It makes dense, sparse and ColBERT vectors."
        )


def test_two_models_are_compared_side_by_side(
    browser, several: RunningServer, hold_loading: Path
) -> None:
    several.wait_until_healthy()
    with open_page(browser, several.url, "search") as page:
        page.wait_for_selector("#why > *")
        page.click("#compare-panel summary")
        with several.client() as client:
            client.post("/embeddings", json={"sentences": ["loads it"], "model": "tiny-splade"})
            hold_loading.touch()
            assert client.post("/test/unload/tiny-splade").status_code == 200
        page.select_option("#compare-model", "tiny-splade")
        page.click("#compare-button")
        loading = page.locator("#compare-model option:checked")
        expect(loading).to_have_text("tiny-splade (being loaded)")
        hold_loading.unlink()
        expect(page.locator(".column.second h3")).to_contain_text("tiny-splade, float32")
        # The models have no kind in common: each has all of its own.
        assert page.locator("#compare-kinds button").all_inner_texts() == ["Fused"]
        query, passages = page.input_value("#search-query"), page.input_value("#corpus")
        scores = scores_of(several, "tiny-splade", query, passages.split("\n\n"))
        shown = page.locator(".column.second .hit-head .number").all_inner_texts()
        best = np.sort(scores)[::-1][: len(shown)]
        np.testing.assert_allclose([float(each) for each in shown], best, atol=0.001)
        rows = page.locator("#compare-facts tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows][:3] == [
            "Dense, bytes per vector",
            "Sparse, bytes per vector",
            "Time to score 26 passages",
        ]
        assert [row.split("\t").index("–") for row in rows[:2]] == [2, 1]
        choose(page, "tiny-splade")
        expect(page.locator(".column.sparse")).to_be_visible()
        page.click("#compare-button")
        expect(page.locator("#compare-message")).to_contain_text("are float32 in every format")


def test_a_reranker_of_several_labels_fills_its_column(browser, several: RunningServer) -> None:
    several.wait_until_healthy()
    with open_page(browser, several.url, "search", media=STILL) as page:
        page.wait_for_selector("#why > *")
        expect(page.locator(".column.reranked .hit").first).to_be_visible()
        assert findings(page) == []


def test_the_choice_is_kept_in_the_tab_and_the_service_shows_every_model(
    browser, several: RunningServer
) -> None:
    several.wait_until_healthy()
    with open_page(browser, several.url, "service") as page:
        wait_for_view(page, "service")
        choose(page, "tiny-splade")
        page.reload()
        expect(page.locator("#embedder")).to_have_value("tiny-splade")
        row = page.locator("#served tbody tr", has_text="tiny-dense")
        expect(row).to_have_text(re.compile("embed.*ready.*dense"))
        page.evaluate("sessionStorage.setItem('smart-embedder-embedder', 'gone-since')")
        page.reload()
        expect(page.locator("#embedder")).to_have_value("")
