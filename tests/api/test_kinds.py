"""A server whose model makes dense vectors alone."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.encoders import reference_vectors, save_family, word_tokenizer
from tests.support.server import run_server


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-modernbert"
    return save_family(folder, "modernbert", word_tokenizer())


@pytest.fixture(scope="module")
def client(modernbert: Path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    settings = {"EMBEDDING_MODEL": str(modernbert), "RERANKER_MODEL": "none"}
    with run_server(folder, **settings) as running, running.client() as client:
        running.wait_until_healthy()
        yield client


def test_a_request_that_names_no_kind_gets_those_that_are_made(client, modernbert) -> None:
    texts = ["search", "music " * 90, ""]
    answer = client.post("/embeddings/", json={"sentences": texts})
    kinds = [item["embeddings"] for item in answer.json()["data"]]
    made = np.float32([each["dense"] for each in kinds])
    np.testing.assert_allclose(made, reference_vectors(modernbert, texts), rtol=0, atol=1e-5)
    assert all(each["sparse"] is each["colbert"] is None for each in kinds)
    stream = client.post(
        "/embeddings/stream",
        content=b'"search"\n',
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert stream.json()["embeddings"] == kinds[0]


@pytest.mark.parametrize("kind", ["sparse", "colbert"])
def test_a_kind_that_is_not_made_is_refused(client, kind) -> None:
    asked = {"sentences": ["search"], f"return_{kind}": True}
    answer = client.post("/embeddings/", json=asked)
    assert (answer.status_code, answer.json()["code"]) == (400, "kind_not_made")
    asked = {"input": "search", f"return_{kind}": True}
    answer = client.post("/v1/embeddings", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "kind_not_made")


def test_sparse_vectors_of_another_dialect_are_refused(client) -> None:
    answer = client.post("/embed_sparse", json={"inputs": ["search"]})
    assert "Sparse vectors are not made here" in answer.text
    assert answer.status_code == 400


def test_nothing_is_left_to_ask_for(client) -> None:
    answer = client.post("/embeddings/", json={"sentences": ["search"], "return_dense": False})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "Nothing is asked for" in answer.json()["detail"]


def test_openai_vectors_are_scaled_unless_a_request_declines(client) -> None:
    def norm(**options) -> float:
        answer = client.post("/v1/embeddings", json={"input": "search"} | options).json()
        return sum(x * x for x in answer["data"][0]["embedding"]) ** 0.5

    assert norm() == pytest.approx(1, abs=1e-5)
    assert norm(normalize=False) > 2


def test_its_name_and_how_it_is_computed_are_shown(client) -> None:
    health = client.get("/health").json()
    assert (health["model"], health["dtype"]) == ("tiny-modernbert", "float32")
    (model,) = health["models"]
    assert (model["paths"]["batch"], model["refused"]) == ("packed", [])
