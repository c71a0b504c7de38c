"""POST /extract: spans of the transformers pipeline, options, refusals and counts."""

from itertools import pairwise
from pathlib import Path

import pytest
import transformers

from smart_embedder.models_file import read_model_entries
from tests.app.conftest import answered, metric, serving
from tests.support.classifiers import LABELS, random_texts, save_token_classifier

TEXTS = ["hybrid search, vector", "", *random_texts(6, seed=1)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    return save_token_classifier(tmp_path_factory.mktemp("extract") / "tiny-ner", "Bert")


@pytest.fixture(scope="module")
def client(tiny_m3: Path, classifier: Path):
    file = classifier.parent / "models.yaml"
    file.write_text(f"- name: {classifier}\n  task: extract\n  aliases: [names]\n", "utf-8")
    entries = read_model_entries(file)
    with serving(embedding_model=str(tiny_m3), models=entries, max_sentences_per_request=64) as app:
        yield app


@pytest.mark.parametrize("aggregation", ["none", "simple"])
def test_spans_equal_the_pipeline(client, classifier, aggregation) -> None:
    answer = answered(client, "/extract", texts=TEXTS, aggregation=aggregation)
    pipeline = transformers.pipeline("token-classification", str(classifier), device="cpu")
    key = "entity" if aggregation == "none" else "entity_group"
    assert [row["id"] for row in answer["data"]] == [*range(len(TEXTS))]
    for text, row in zip(TEXTS, answer["data"], strict=True):
        expected = pipeline(text, aggregation_strategy=aggregation) if text.strip() else []
        assert [(span["start"], span["end"], span["label"]) for span in row["spans"]] == [
            (span["start"], span["end"], span[key]) for span in expected
        ]
        for span, reference in zip(row["spans"], expected, strict=True):
            assert span["score"] == pytest.approx(float(reference["score"]), abs=1e-5)
            assert span["text"] == text[span["start"] : span["end"]]
    assert answer["model_name"] == "tiny-ner"
    assert answer["usage"]["total_tokens"] > len(TEXTS)


def test_without_options_spans_are_those_of_simple(client) -> None:
    plain = answered(client, "/extract", texts=TEXTS)
    simple = answered(client, "/extract", texts=TEXTS, aggregation="simple", model="names")
    assert plain["data"] == simple["data"]
    assert plain["vector_space"] == simple["vector_space"]


def test_threshold_and_labels_leave_spans_out(client) -> None:
    spans = [row["spans"] for row in answered(client, "/extract", texts=TEXTS)["data"]]
    middle = sorted(span["score"] for row in spans for span in row)[5]
    body = {"texts": TEXTS, "threshold": middle, "labels": ["PER", "LOC"]}
    kept = [row["spans"] for row in answered(client, "/extract", **body)["data"]]
    assert kept == [
        [span for span in row if span["score"] >= middle and span["label"] in {"PER", "LOC"}]
        for row in spans
    ]
    assert 0 < sum(map(len, kept)) < sum(map(len, spans))
    whole = {"texts": TEXTS, "aggregation": "none", "labels": ["B-PER"]}
    labels = [s["label"] for r in answered(client, "/extract", **whole)["data"] for s in r["spans"]]
    assert set(labels) == {"B-PER"}
    none = answered(client, "/extract", texts=TEXTS, labels=[])
    assert [row["spans"] for row in none["data"]] == [[] for _ in TEXTS]


def test_a_text_longer_than_the_model_is_read_whole(client) -> None:
    text = " ".join(random_texts(60, seed=2))
    (row,) = answered(client, "/extract", texts=[text])["data"]
    spans = row["spans"]
    assert len(spans) > 100
    assert spans[-1]["end"] > len(text) - 20
    assert all(first["end"] <= second["start"] for first, second in pairwise(spans))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"texts": []}, 400, "The list texts is empty"),
        ({"texts": ["a"] * 65}, 422, "at most 64 are allowed (MAX_SENTENCES_PER_REQUEST)"),
        ({"texts": ["a"], "labels": ["x" * 1_000_000]}, 422, "with the aggregation simple, are PE"),
        ({"texts": ["a"], "labels": [f"l{i}" for i in range(1500)]}, 422, "are PER, LOC, 2."),
        ({"texts": ["a"], "labels": ["B-PER"]}, 422, "labels has one that tiny-ner does not know"),
        ({"texts": ["a"], "aggregation": "best"}, 422, "'average' or 'max'"),
        ({"texts": ["a"], "threshold": 1.5}, 422, "The field threshold is out of range"),
        ({"sentences": ["a"]}, 422, "rename sentences to texts"),
        ({"texts": ["a"], "model": "tiny-m3"}, 404, "the models with the task extract are tiny-"),
        ({"texts": ["! " * 120_000]}, 422, "The labels of all tokens of these texts need"),
    ],
)
def test_a_wrong_body_is_refused_in_one_sentence(client, body, status, message) -> None:
    answer = client.post("/extract", json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]
    assert len(answer.content) < 1000


def test_lone_surrogates_are_read_as_one_character(client) -> None:
    headers = {"Content-Type": "application/json"}
    body = b'{"texts": ["search \\ud800 vector"]}'
    answer = client.post("/extract", content=body, headers=headers).json()
    (row,) = answered(client, "/extract", texts=["search \ufffd vector"])["data"]
    assert answer["data"] == [row]
    assert [warning["code"] for warning in answer["warnings"]] == ["surrogate_replaced"]


def test_another_vector_space_is_refused(client) -> None:
    answer = client.post("/extract", json={"texts": ["a"]})
    own = answer.json()["vector_space"]["score"]
    assert answer.headers["Vector-Space"] == own
    answered(client, "/extract", texts=["a"], if_vector_space=own)
    other = {"texts": ["a"], "if_vector_space": "score-000000000000"}
    assert client.post("/extract", json=other).status_code == 412


def test_requests_are_counted_under_their_path(client) -> None:
    series = {"status": "success", "endpoint": "/extract"}
    before = metric(client, "embedding_requests_total", **series)
    texts = metric(client, "embedding_sentences_processed_total")
    answered(client, "/extract", texts=["a", "b"])
    client.post("/extract", json={"texts": []})
    assert metric(client, "embedding_requests_total", **series) == before + 1
    assert metric(client, "embedding_sentences_processed_total") == texts + 2
    series["status"] = "client_error"
    assert metric(client, "embedding_requests_total", **series) >= 1


def test_the_model_is_listed_with_its_task_and_labels(client) -> None:
    answered(client, "/extract", texts=["a"])
    listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert (listed["names"]["task"], listed["names"]["state"]) == ("extract", "ready")
    (status,) = [
        model
        for model in client.get("/health").json()["served_models"]
        if model["task"] == "extract"
    ]
    assert status["makes"]["kinds"] == ["spans"]
    assert status["makes"]["max_length"] == 128
    info = client.get("/models/names/info").json()
    assert [*info["model_type"]["classifier"]["label2id"]] == [*LABELS]
    for path in ("/models/names/embed", "/models/names/rerank"):
        body = {"inputs": "a", "query": "a", "texts": ["b"]}
        assert client.post(path, json=body).status_code == 422


def test_without_a_model_for_it_extraction_says_how_to_add_one(tiny_m3: Path) -> None:
    with serving(embedding_model=str(tiny_m3)) as plain:
        answer = plain.post("/extract", json={"texts": ["a"]})
    assert answer.status_code == 404
    assert "task extract are served here: add one to MODELS" in answer.json()["detail"]


def test_tokens_are_charged_to_a_named_token(tiny_m3: Path, classifier: Path, tmp_path) -> None:
    tokens, models = tmp_path / "tokens", tmp_path / "models.yaml"
    tokens.write_text("alice:secret\ntokens_per_minute=5 weight=2\n")
    models.write_text(f"- name: {classifier}\n  task: extract\n", "utf-8")
    settings = {"models": read_model_entries(models), "api_tokens_file": tokens}
    headers = {"Authorization": "Bearer secret"}
    with serving(embedding_model=str(tiny_m3), **settings) as app:
        answers = [app.post("/extract", json={"texts": TEXTS}, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert "tokens_per_minute of alice" in answers[1].json()["detail"]
        used = answers[0].json()["usage"]["total_tokens"]
        line = f'embedder_client_tokens_total{{client="alice"}} {used:.1f}'
        assert line in app.get("/metrics").text.splitlines()
