"""POST /embeddings/ through a real server process: the whole contract of the endpoint."""

import numpy as np
import orjson
import pytest

from tests.api.conftest import answered
from tests.support.server import RunningServer
from tests.support.texts import varied_texts

KINDS = ("dense", "sparse", "colbert")


def post(client, **body):
    return answered(client, "/embeddings/", **body)


def test_one_text_gets_all_three_kinds_by_default(client) -> None:
    answer = post(client, sentences=["hybrid search"])
    (item,) = answer["data"]
    assert (item["id"], item["text"]) == (0, "hybrid search")
    embeddings = item["embeddings"]
    assert len(embeddings["dense"]) == 64
    assert all(isinstance(key, str) and weight > 0 for key, weight in embeddings["sparse"].items())
    assert [len(vector) for vector in embeddings["colbert"]] == [64] * (
        answer["usage"]["prompt_tokens"] - 1
    )


def test_the_answer_has_exactly_the_fields_of_the_contract(client, server) -> None:
    answer = post(client, sentences=["a", "b"])
    names = ["model_name", "dense_model_name", "sparse_model_name", "colbert_model_name"]
    rest = ["processing_time_ms", "warnings", "usage", "timings_ms"]
    assert list(answer) == ["data", *names, *rest]
    assert {answer[name] for name in names} == {client.get("/health").json()["model"]}
    assert answer["warnings"] == []
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    timings = answer["timings_ms"]
    assert set(timings) == {"tokenize", "queue", "inference", "total"}
    parts = timings["tokenize"] + timings["queue"] + timings["inference"]
    assert parts == pytest.approx(timings["total"], abs=0.01)
    assert answer["processing_time_ms"] == timings["total"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_not_asked_for_is_null(client, kind: str) -> None:
    wanted = {f"return_{other}": other == kind for other in KINDS}
    embeddings = post(client, sentences=["search"], **wanted)["data"][0]["embeddings"]
    assert list(embeddings) == list(KINDS)
    assert [other for other in KINDS if embeddings[other] is not None] == [kind]


def test_sparse_as_indices_is_what_a_qdrant_sparse_vector_takes(client) -> None:
    text = "hybrid search search"
    as_map = post(client, sentences=[text])["data"][0]["embeddings"]["sparse"]
    as_lists = post(client, sentences=[text], sparse_as_indices=True)
    sparse = as_lists["data"][0]["embeddings"]["sparse"]
    assert list(sparse) == ["indices", "values"]
    assert {str(i): v for i, v in zip(*sparse.values(), strict=True)} == as_map


def test_bge_m3s_dense_vector_has_unit_length_either_way(client) -> None:
    for normalize in (False, True):
        answer = post(client, sentences=["search"], normalize_dense=normalize)
        vector = answer["data"][0]["embeddings"]["dense"]
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_numbers_survive_the_way_through_json(client, server, embedder) -> None:
    """What the client reads is the float32 that the model computed, to the last bit."""
    from smart_embedder.engine.records import Outputs  # noqa: PLC0415

    texts = varied_texts(12)
    answer = post(client, sentences=texts)
    ours = embedder.forward([t.ids for t in embedder.tokenize(texts)], Outputs(True, True, True))
    for item, expected in zip(answer["data"], ours, strict=True):
        dense = np.array(item["embeddings"]["dense"], np.float32)
        np.testing.assert_allclose(dense, expected.dense, rtol=0, atol=1e-5)
        keys = [int(key) for key in item["embeddings"]["sparse"]]
        assert keys == expected.sparse.indices.tolist()


def test_an_over_long_text_is_embedded_and_reported(client) -> None:
    answer = post(client, sentences=["short", "search " * 9000], return_colbert=False)
    (warning,) = answer["warnings"]
    assert (warning["code"], warning["severity"]) == ("input_truncated", "warning")
    assert warning["target"] == {"field": "sentences", "index": 1, "pointer": "/sentences/1"}
    assert warning["details"] == {
        "model": answer["model_name"],
        "max_tokens": 8192,
        "original_tokens": 9002,
        "truncated_tokens": 810,
        "truncation_side": "end",
    }
    assert "9002 tokens" in warning["message"]


def test_a_large_response_is_rendered_while_it_is_read(client) -> None:
    texts = [f"search {i} " + "vector " * 300 for i in range(24)]
    uncompressed = {"Accept-Encoding": "identity"}
    response = client.post("/embeddings/", json={"sentences": texts}, headers=uncompressed)
    assert "content-length" not in response.headers
    assert len(response.content) > 4 << 20
    answer = orjson.loads(response.content)
    assert [item["id"] for item in answer["data"]] == list(range(24))
    counts = [len(item["embeddings"]["colbert"]) for item in answer["data"]]
    assert sum(counts) == answer["usage"]["prompt_tokens"] - 24


def test_many_clients_at_once_each_get_their_own_answer(server: RunningServer) -> None:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    texts = varied_texts(120)

    def ask(i: int) -> tuple[list[float], str]:
        with server.client() as own:
            item = post(own, sentences=[texts[i]], return_colbert=False)["data"][0]
        return item["embeddings"]["dense"], item["text"]

    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(ask, range(120)))
    with server.client() as own:
        alone = [post(own, sentences=[t], return_colbert=False)["data"][0] for t in texts]
    for (dense, text), item in zip(together, alone, strict=True):
        assert text == item["text"]
        np.testing.assert_allclose(dense, item["embeddings"]["dense"], rtol=0, atol=1e-5)
