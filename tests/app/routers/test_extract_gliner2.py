"""POST /extract with a model of GLiNER2: its spans, options, refusals and counts."""

from pathlib import Path

import pytest

from smart_embedder.models_file import read_model_entries
from tests.app.conftest import answered, serving
from tests.support.checkpoints import plain_corpus
from tests.support.classifiers import DEBERTA, save_gliner2

engine = pytest.importorskip("gliner2.inference.engine", reason="needs the extra gliner2")

TEXTS = ["Hybrid search, vector", "", *plain_corpus(6), " ".join(plain_corpus(30))]
LABELS = ["person", "place"]
OPTIONS = {"labels": LABELS, "threshold": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_gliner2(tmp_path_factory.mktemp("extract") / "tiny-gliner2", **DEBERTA)


@pytest.fixture(scope="module")
def client(tiny_m3: Path, folder: Path):
    file = folder.parent / "models.yaml"
    file.write_text(f"- name: {folder}\n  task: extract\n", "utf-8")
    with serving(embedding_model=str(tiny_m3), models=read_model_entries(file)) as app:
        yield app


def test_spans_equal_the_package(client, folder) -> None:
    answer = answered(client, "/extract", texts=TEXTS, **OPTIONS)
    reference = engine.SpanExtractor.from_pretrained(str(folder)).eval()
    seen = 0
    for text, row in zip(TEXTS[:-1], answer["data"], strict=False):
        found = reference.extract_entities(
            text, LABELS, 0.05, include_confidence=True, include_spans=True
        )
        expected = [
            (span["start"], min(span["end"], len(text)), label, span["confidence"])
            for label, spans in found["entities"].items()
            for span in spans
            if span["start"] < len(text)
        ]
        expected.sort(key=lambda span: span[:2])
        spans = [(span["start"], span["end"], span["label"]) for span in row["spans"]]
        assert spans == [span[:3] for span in expected]
        assert [span["score"] for span in row["spans"]] == pytest.approx(
            [span[3] for span in expected], abs=1e-5
        )
        seen += len(expected)
    assert seen > 5
    assert answer["model_name"] == "tiny-gliner2"
    assert [row["spans"] for row in answer["data"]][1] == []
    assert len(answer["data"][-1]["spans"]) > 10


def test_by_default_only_likely_spans_are_returned(client) -> None:
    scores = [
        [
            span["score"]
            for row in answered(client, "/extract", texts=TEXTS, labels=LABELS, **options)["data"]
            for span in row["spans"]
        ]
        for options in ({}, {"threshold": 0.5}, {"threshold": 0})
    ]
    assert scores[0] == scores[1]
    assert len(scores[2]) > len(scores[0])


def test_tokens_of_labels_are_counted_with_each_text(client) -> None:
    counts = [
        answered(client, "/extract", texts=["vector"] * 3, labels=labels)["usage"]["total_tokens"]
        for labels in (LABELS[:1], LABELS)
    ]
    assert counts[1] - counts[0] >= 3 * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "The option labels is required for tiny-gliner2"),
        ({"labels": []}, "The option labels is required for tiny-gliner2"),
        (
            {"labels": [f"l{i}" for i in range(10_000)]},
            "labels has 48890 characters, and tiny-glin",
        ),
        ({"labels": ["a", "x" * 1_000_000]}, "The option labels has 1000001 characters"),
        ({"labels": [str(i) for i in range(4000)]}, "The labels take "),
        ({"labels": ["a", "[E]"]}, "The option labels has a token that tiny-gliner2 reads"),
        ({"labels": LABELS, "aggregation": "simple"}, "aggregation has no effect on tiny-gliner2"),
        ({"labels": LABELS, "texts": ["! " * 400_000]}, "The labels of all tokens of these texts"),
    ],
)
def test_a_wrong_body_is_refused_in_one_sentence(client, body, message) -> None:
    answer = client.post("/extract", json={"texts": ["a"]} | body)
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["detail"]
    assert len(answer.content) < 1000


def test_sie_clients_find_the_same_spans(client) -> None:
    spans = answered(client, "/extract", texts=TEXTS[:1], **OPTIONS)["data"][0]["spans"]
    params = {"labels": LABELS, "options": {"threshold": 0.05}}
    body = {"items": [{"text": TEXTS[0]}], "params": params}
    headers = {"Accept": "application/json"}
    answer = client.post("/v1/extract/tiny-gliner2", json=body, headers=headers).json()
    entities = answer["items"][0]["entities"]
    assert [(e["start"], e["label"]) for e in entities] == [(s["start"], s["label"]) for s in spans]
