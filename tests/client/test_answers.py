"""The clients return the numbers of the JSON responses as numpy arrays."""

import itertools
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smart_embedder_client import (
    Client,
    EmbedOptions,
    RerankOptions,
    RerankWeights,
    SmartEmbedderError,
)
from smart_embedder_client.calls import embed_calls
from transformers import BertModel

from app import schemas
from app.answers import reserve_rendering_memory
from smart_embedder.pipelines.embedding import count_vector_bytes
from smart_embedder.requests import ANSWER_BYTES, AnswerMemory, EmbedRequest, Outputs
from smart_embedder.results import TextEmbedding
from tests.support.server import run_server
from tests.support.texts import varied_texts
from tests.support.wordpiece import save_colbert

TEXTS = [*varied_texts(6), "", "search " * 40]
# Options that only change the JSON response.
OF_JSON = {"sentences", "sparse_as_indices", "encoding"}


@pytest.fixture(scope="module")
def plain(server):
    """Requests the same as JSON, with arrays in numpy's types."""
    with server.client() as http:

        def ask(path: str, **body):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield ask


def equal(array: np.ndarray, numbers: list, dtype: str) -> None:
    assert array.dtype == dtype
    expected = np.array(numbers, dtype).reshape(array.shape)
    assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype_name", ["float32", "int8", "ubinary"])
def test_vectors_equal_those_in_json_to_the_last_bit(client, plain, dtype_name: str) -> None:
    dtype = {"ubinary": "uint8"}.get(dtype_name, dtype_name)
    options = {"return_tokens": True, "muvera": "query"} if dtype_name == "float32" else {}
    options |= {"output_dtype": dtype_name, "return_colbert": True}
    found = client.embed(TEXTS, **options)
    answer = plain("/embeddings/", sentences=TEXTS, sparse_as_indices=True, **options)["data"]
    expected = [item["embeddings"] for item in answer]
    assert found.output_dtype == dtype_name
    equal(found.dense, [vectors["dense"] for vectors in expected], dtype)
    for i, vectors in enumerate(expected):
        equal(found.sparse[i].indices, vectors["sparse"]["indices"], "uint32")
        equal(found.sparse[i].values, vectors["sparse"]["values"], "float32")
        weights = zip(vectors["sparse"]["indices"], vectors["sparse"]["values"], strict=True)
        assert found.sparse[i].as_dict() == pytest.approx(dict(weights))
        equal(found.colbert[i], vectors["colbert"], dtype)
        assert found.colbert[i].ndim == 2
        if "muvera" in options:
            equal(found.muvera[i], vectors["muvera"], "float32")
            assert asdict(found.tokens[i]) == answer[i]["tokens"]
        if dtype_name.endswith("int8"):
            equal(found.colbert_scale[i], vectors["colbert_scale"], "float32")
    if dtype_name.endswith("int8"):
        equal(found.dense_scale, [vectors["dense_scale"] for vectors in expected], "float32")
    else:
        assert (found.dense_scale, found.colbert_scale) == (None, None)
    if "muvera" not in options:
        assert (found.muvera, found.tokens) == (None, None)


def test_float16_and_bfloat16_output(client) -> None:
    full = client.embed(TEXTS).dense
    half = client.embed(TEXTS, output_dtype="float16").dense
    assert half.tobytes() == full.astype(np.float16).tobytes()
    brain = client.embed(TEXTS, output_dtype="bfloat16").dense
    assert brain.dtype == np.float32
    assert not (brain.view(np.uint32) & 0xFFFF).any()
    np.testing.assert_allclose(brain, full, rtol=2**-8)


def test_metadata_of_a_response(client, plain) -> None:
    health = client.health()
    assert (health.ready, health.status, health.reason) == (True, "healthy", None)
    assert health.details["model"] == "tiny-m3"
    found = client.embed(["search " * 9000])
    answer = plain("/embeddings/", sentences=["search " * 9000], return_colbert=False)
    assert found.usage == answer["usage"]
    assert found.warnings == answer["warnings"] != []
    assert found.model_name == found.colbert_model_name == answer["model_name"]
    assert found.timings_ms.keys() == answer["timings_ms"].keys()
    assert found.request_id


def test_rerank(client, plain) -> None:
    found = client.rerank("search", TEXTS, weights={"sparse": 0.5})
    results = plain("/rerank", query="search", passages=TEXTS, weights={"sparse": 0.5})["results"]
    equal(found.indices, [result["index"] for result in results], "int64")
    equal(found.scores, [result["score"] for result in results], "float32")
    assert found.passages == [result["passage"] for result in results]
    assert found.parts.keys() == {"dense", "sparse", "colbert"}
    for name, scores in found.parts.items():
        equal(scores, [result["parts"][name] for result in results], "float32")


def test_count_tokens(client) -> None:
    counts = client.count_tokens(["search", "", "search river"])
    assert counts == client.count_tokens(["search", "", "search river"], model="tiny-m3")
    assert counts[1] == 0 < counts[0] < counts[2]
    with pytest.raises(SmartEmbedderError, match=r"404 .*"):
        client.count_tokens(["search"], model="another")


def test_tokenize_returns_ids_and_spans(client) -> None:
    text = "search a river"
    found, empty = client.tokenize([text, ""])
    ids = dict(zip((text[begin:end] for begin, end in found.spans), found.ids, strict=True))
    assert [word.strip() for word in ids] == text.split()
    assert (empty.ids.shape, empty.spans.shape) == ((0,), (0, 2))


def test_long_list_is_sent_in_several_requests(client) -> None:
    texts = [f"river {i}" for i in range(1030)] + ["search " * 9000]
    found = client.embed(texts, return_tokens=True, output_dtype="int8")
    assert len(found.sparse) == len(found.tokens) == len(texts)
    assert found.dense.shape == (len(texts), 64)
    assert found.dense_scale.shape == (len(texts),)
    assert not found.dense.flags.writeable
    last = client.embed(texts[-2:], output_dtype="int8")
    np.testing.assert_allclose(found.dense[-2:], last.dense, atol=1)
    (warning,) = found.warnings
    assert warning["target"]["index"] == 1030
    assert warning["target"]["pointer"] == "/sentences/1030"
    assert "/sentences/1030 has 9002 tokens" in warning["message"]
    assert found.usage["prompt_tokens"] > last.usage["prompt_tokens"] + 2000


@pytest.mark.parametrize(("with_colbert", "most"), [(False, 524_288), (True, 16_384)])
@given(st.lists(st.sampled_from(["", "river", "\u06de" * 9_000, "a" * 70_000]), max_size=30))
@settings(max_examples=20)
def test_list_is_split_by_bytes(with_colbert: bool, most: int, texts: list[str]) -> None:
    options = {"return_colbert": with_colbert}
    parts = [call.body["sentences"] for _, call in embed_calls(texts, options, None)]
    assert [text for part in parts for text in part] == texts
    sizes = [sum(len(text.encode()) for text in part) for part in parts]
    assert all(size <= most or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    # There are no more parts than needed.
    assert all(a + b > most for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_colbert": True},
        {"return_colbert": True, "output_dtype": "int8"},
        {"muvera": "query"},
    ],
)
def test_no_request_exceeds_the_limit_of_a_response(options) -> None:
    options = {"return_colbert": False} | options
    outputs = Outputs(True, True, options["return_colbert"])
    more = {name: value for name, value in options.items() if name != "return_colbert"}
    request = EmbedRequest([], outputs, **more)
    calls = [
        call
        for texts in (["a usual sentence "] * 9000, ["a usual sentence " * 100] * 90)
        for _, call in embed_calls(texts, options, None)
    ]
    for call in calls:
        # A token per three bytes is a lot, and no usual model is wider than BGE-M3.
        lengths = [len(text) // 3 for text in call.body["sentences"]]
        size = count_vector_bytes(_BgeM3(), request.needed, lengths)
        embeddings = [
            TextEmbedding(
                dense=np.zeros(1024, np.float32),
                colbert=np.zeros((length, 1024), np.float32) if request.needed.colbert else None,
            )
            for length in lengths
        ]
        memory = AnswerMemory()
        reserve_rendering_memory(embeddings, request, memory, at_once=True)
        assert size + memory.held <= ANSWER_BYTES


class _BgeM3:
    dense_width = colbert_width = 1024


def test_embed_query_and_documents_without_prompts(client) -> None:
    plain = client.embed(["a river"])
    assert plain.colbert is None, "ColBERT vectors are only returned on request"
    for same in (client.embed_query("a river"), client.embed_documents(["a river"])):
        assert same.dense.tobytes() == plain.dense.tobytes()
    with pytest.raises(TypeError, match="leave the option out"):
        client.embed_query("a river", input_type="document")


def test_embed_query_and_documents_of_a_colbert_model(tmp_path: Path) -> None:
    model = str(save_colbert(tmp_path / "tiny-colbert", BertModel))
    with (
        run_server(tmp_path, EMBEDDING_MODEL=model, RERANKER_MODEL="none") as server,
        Client(server.url) as client,
    ):
        query = client.embed_query("a river", return_colbert=True)
        (document,) = client.embed_documents(["a river"], return_colbert=True).colbert
        with pytest.raises(SmartEmbedderError, match="set .*return_colbert to true"):
            client.embed_query("a river")
    assert (query.dense, query.sparse) == (None, None)
    # PyLate pads queries.
    assert len(query.colbert[0]) > len(document) > 0


def test_the_options_are_those_of_the_service() -> None:
    options = [EmbedOptions, RerankOptions, RerankWeights]
    bodies = [schemas.EmbeddingRequest, schemas.RerankBody, schemas.RerankWeights]
    left_out = [OF_JSON, {"query", "passages"}, set()]
    for option, body, names in zip(options, bodies, left_out, strict=True):
        assert option.__annotations__.keys() == body.model_fields.keys() - names


def test_if_vector_space_is_accepted_or_refused_with_412(plain, server, other_server) -> None:
    with Client(server.url) as client:
        found = client.embed(["river"], return_colbert=True)
        answer = plain("/embeddings/", sentences=["river"])
        assert found.vector_space == answer["vector_space"]
        ids = list(found.vector_space.values())
        for ask in (client.embed, client.embed_documents):
            again = ask(["river"] * 1500, if_vector_space=ids)
            assert again.vector_space.items() < found.vector_space.items()
        ranking = client.rerank("river", TEXTS)
        assert set(ranking.vector_space.values()) <= {*ids}
        client.rerank("river", TEXTS, if_vector_space=ids)
        with pytest.raises(TypeError, match="put it into a list"):
            client.embed(["river"], if_vector_space=ids[0])
        with pytest.raises(SmartEmbedderError, match="no ids of vector spaces .invalid_input"):
            client.embed(["river"], if_vector_space=["dense\n"])
    with Client(other_server.url) as client:
        for ask in (client.embed, lambda texts, **options: client.rerank("a", texts, **options)):
            with pytest.raises(SmartEmbedderError, match="vector_space_differs"):
                ask(["river"], if_vector_space=ids)


def test_response_in_another_format_is_refused(server) -> None:
    """A service or a proxy may ignore the Accept header."""

    def ask_for_json(request: httpx.Request) -> None:
        request.headers["Accept"] = "application/json"

    with (
        httpx.Client(event_hooks={"request": [ask_for_json]}) as http,
        Client(server.url, http=http) as client,
        pytest.raises(SmartEmbedderError, match="is application/json and not safetensors"),
    ):
        client.embed(TEXTS)
