"""SIE's API: vectors, scores and spans in JSON and MessagePack, options, errors, model lists."""

from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest

from app.context import ErrorFacts
from app.dialects.sie_schemas import SIE
from app.message_pack import MESSAGE_PACK, pack
from smart_embedder.models_file import read_model_entries
from tests.app.conftest import answered, metric, serving
from tests.app.dialects.conftest import dense
from tests.support.classifiers import save_token_classifier
from tests.support.formats import from_message_pack
from tests.support.pictures import data_url, draw_picture, save_image_text, save_picture

TEXTS = ["hybrid search", "", "река 世界", "vector " * 400]
ITEMS = [{"id": "first", "text": TEXTS[0]}, *({"text": text} for text in TEXTS[1:])]
ALL = ["dense", "sparse", "multivector"]
SDK = {"X-SIE-SDK-Version": "0.10.1"}


@pytest.fixture(scope="module")
def client(tiny_m3: Path, tiny_reranker: Path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sie")
    classifier = save_token_classifier(folder / "tiny-ner", "Bert")
    models = folder / "models.yaml"
    pictures = save_image_text(folder / "tiny-clip", "clip")
    models.write_text(
        f"- name: {classifier}\n  task: extract\n  load: start\n"
        f"- name: {pictures}\n  load: start\n",
        "utf-8",
    )
    with serving(
        embedding_model=str(tiny_m3),
        reranker_model=str(tiny_reranker),
        models=read_model_entries(models),
        model_aliases="BAAI/bge-m3=tiny-m3",
        max_sentences_per_request=40,
        bge_embed_max_length=300,
    ) as client:
        yield client


def ask(client, path: str, body: dict, accept: str = MESSAGE_PACK, **headers: str) -> dict:
    """Send a body as SIE's client does, and read the response."""
    content = b"".join(pack(body))
    headers = {"content-type": MESSAGE_PACK, "accept": accept} | headers
    answer = client.post(path, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == MESSAGE_PACK
    return from_message_pack(answer.content)


def encode(client, path: str = "/v1/encode/BAAI/bge-m3", items=ITEMS, **params) -> list[dict]:
    return ask(client, path, {"items": items} | ({"params": params} if params else {}))["items"]


def test_vectors_equal_the_native_ones_to_the_last_bit(client) -> None:
    answer = ask(client, "/v1/encode/tiny-m3", {"items": ITEMS, "params": {"output_types": ALL}})
    native = answered(client, "/embeddings/", sentences=TEXTS, sparse_as_indices=True)
    for item, expected in zip(answer["items"], native["data"], strict=True):
        vectors = expected["embeddings"]
        assert item["dense"]["values"].tobytes() == np.float32(vectors["dense"]).tobytes()
        sparse, multivector = item["sparse"], item["multivector"]
        assert sparse["indices"].tolist() == vectors["sparse"]["indices"]
        assert sparse["values"].tobytes() == np.float32(vectors["sparse"]["values"]).tobytes()
        assert multivector["values"].tobytes() == np.float32(vectors["colbert"]).tobytes()
        assert (multivector["num_tokens"], multivector["token_dims"]) == multivector["values"].shape
        assert item["dense"]["dims"] == 64
    assert [item.get("id") for item in answer["items"]] == ["first", None, None, None]
    assert answer["model"] == native["model_name"]
    assert answer["usage"] == {"input_tokens": native["usage"]["total_tokens"]}
    stages = {"total_ms", "queue_ms", "tokenization_ms", "inference_ms"}
    assert answer["timing"].keys() == stages


def test_json_and_message_pack_hold_the_same(client) -> None:
    body = {"items": ITEMS, "params": {"output_types": ALL, "output_dtype": "float16"}}
    arrays = ask(client, "/v1/encode/tiny-m3", body)
    answer = client.post("/v1/encode/tiny-m3", json=body, headers={"accept": "application/json"})
    found = answer.json()
    for item, other in zip(found["items"], arrays["items"], strict=True):
        assert item.keys() == other.keys()
        for kind in ALL:
            assert item[kind].keys() == other[kind].keys()
            values = np.float16(item[kind]["values"])
            assert values.tobytes() == other[kind]["values"].tobytes()
        assert item["sparse"]["indices"] == other["sparse"]["indices"].tolist()
    assert found["usage"] == arrays["usage"]


@pytest.mark.parametrize("accept", ["*/*", "", "application/msgpack, application/json"])
def test_message_pack_is_the_default(client, accept) -> None:
    assert ask(client, "/v1/encode/tiny-m3", {"items": ITEMS[:1]}, accept=accept)["items"]


@pytest.mark.parametrize(
    ("dtype", "kind", "width"),
    [("int8", "int8", 64), ("uint8", "uint8", 64), ("binary", "uint8", 8), ("ubinary", "uint8", 8)],
)
def test_fewer_bits_are_those_of_sie(client, dtype, kind, width) -> None:
    (item,) = encode(client, items=ITEMS[:1], output_dtype=dtype, output_types=ALL)
    (exact,) = encode(client, items=ITEMS[:1], output_types=ALL)
    for name in ("dense", "multivector"):
        values, numbers = item[name]["values"], exact[name]["values"]
        assert (values.dtype, values.shape[-1]) == (kind, width)
        assert item[name]["dtype"] == ("binary" if width == 8 else dtype)
        low, high = numbers.min(-1, keepdims=True), numbers.max(-1, keepdims=True)
        expected = {
            "int8": np.rint(numbers / np.abs(numbers).max(-1, keepdims=True) * 127),
            "uint8": np.rint((numbers - low) / (high - low) * 255),
        }.get(dtype, np.packbits(numbers > 0, -1))
        np.testing.assert_array_equal(values, expected)
    assert item["dense"]["dims"] == 64
    assert item["sparse"]["values"].dtype == np.float32


def test_is_query_and_instruction_choose_the_prompt(full) -> None:
    """As those of the native endpoint, for Qwen's prompt and for models without one."""
    path, texts = "/v1/encode/tiny-qwen", TEXTS[:1]
    vectors = lambda **params: encode(full, path, ITEMS[:1], **params)[0]["dense"]["values"]  # noqa: E731
    task = "Find rivers."
    for params, options in (
        ({}, {"input_type": "document"}),
        ({"options": {"is_query": True}}, {"input_type": "query"}),
        ({"instruction": task}, {"prompt": f"{task} "}),
        (
            {"instruction": task, "options": {"is_query": True}},
            {"prompt": f"Instruct: {task}\nQuery:"},
        ),
    ):
        (expected,) = dense(full, texts, **options)
        assert vectors(**params).tobytes() == np.float32(expected).tobytes()
    params = {"output_types": ["multivector"], "options": {"normalize": False}}
    answer = full.post(path, json={"items": ITEMS[:1], "params": params})
    assert "no effect on these vectors of tiny-qwen" in answer.json()["detail"]["message"]
    raw = vectors(options={"normalize": False})
    (expected,) = dense(full, texts, normalize_dense=False, input_type="document")
    assert raw.tobytes() == np.float32(expected).tobytes()


def test_muvera_stands_for_the_dense_vector(client) -> None:
    (item,) = encode(client, items=ITEMS[:1], options={"muvera": {}, "is_query": True})
    (expected,) = answered(client, "/embeddings/", sentences=TEXTS[:1], muvera="query")["data"]
    values = np.float32(expected["embeddings"]["muvera"])
    assert item.keys() == {"id", "dense"}
    assert item["dense"]["values"].tobytes() == values.tobytes()


def test_scores_are_probabilities_by_falling_score(client) -> None:
    body = {"query": {"id": "q", "text": "hybrid search"}, "items": ITEMS}
    answer = ask(client, "/v1/score/tiny-reranker", body)
    native = answered(client, "/rerank", query="hybrid search", passages=TEXTS, normalize=True)
    names = ["first", "item-1", "item-2", "item-3"]
    assert answer == {
        "model": "tiny-reranker",
        "query_id": "q",
        "scores": [
            {"item_id": names[result["index"]], "score": np.float32(result["score"]), "rank": rank}
            for rank, result in enumerate(native["results"])
        ],
        "usage": {"input_tokens": native["usage"]["total_tokens"]},
    }


def test_entities_are_the_spans_of_extract(client) -> None:
    params = {"labels": ["PER", "LOC"], "options": {"threshold": 0.2}}
    answer = ask(client, "/v1/extract/tiny-ner", {"items": ITEMS, "params": params})
    native = answered(client, "/extract", texts=TEXTS, labels=["PER", "LOC"], threshold=0.2)
    assert [item["id"] for item in answer["items"]] == ["first", "item-1", "item-2", "item-3"]
    for item, row in zip(answer["items"], native["data"], strict=True):
        spans = [span | {"score": np.float32(span["score"])} for span in row["spans"]]
        found = [span | {"score": np.float32(span["score"])} for span in item["entities"]]
        assert found == spans
        assert item["relations"] == item["classifications"] == item["objects"] == []
    assert sum(len(item["entities"]) for item in answer["items"]) > 10


def test_its_client_gets_the_models_in_its_form(client) -> None:
    answered(client, "/extract", texts=["a"])
    models = client.get("/v1/models", headers=SDK).json()["models"]
    embedder, reranker, extractor, pictures = models
    assert embedder | {"max_sequence_length": 0} == {
        "name": "tiny-m3",
        "inputs": ["text"],
        "outputs": ALL,
        "dims": {"dense": 64, "multivector": 64},
        "loaded": True,
        "state": "loaded",
        "max_sequence_length": 0,
        "revision": None,
    }
    assert (reranker["outputs"], extractor["outputs"]) == (["score"], ["json"])
    assert pictures["inputs"] == ["text", "image"]
    assert client.get("/v1/models/BAAI/bge-m3", headers=SDK).json() == embedder
    assert client.get("/v1/models").json()["object"] == "list"
    assert client.get("/v1/models/tiny-m3").json()["object"] == "model"


def test_pictures_are_files_or_base64(client) -> None:
    files = [save_picture(draw_picture(40, 50, seed)) for seed in range(2)]
    body = {
        "model": "tiny-clip",
        "sentences": ["river", *({"image": data_url(file)} for file in files)],
        "normalize_dense": True,
    }
    native = answered(client, "/embeddings/", **body)["data"]
    images = [files[0], b64encode(files[1]).decode()]
    items = [{"text": "river"}, *({"images": [{"data": image}]} for image in images)]
    encoded = encode(client, "/v1/encode/tiny-clip", items)
    for item, expected in zip(encoded, native, strict=True):
        dense = np.float32(expected["embeddings"]["dense"])
        assert item["dense"]["values"].tobytes() == dense.tobytes()


ONE = {"items": [{"text": "a"}]}
PICTURE = {"items": [{"images": [{"data": b"GIF", "format": "gif"}]}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "message"),
    [
        ("encode/none", ONE, 404, "MODEL_NOT_FOUND", "none is not served here"),
        ("encode/tiny-reranker", ONE, 400, "INVALID_INPUT", "does not support this endpoint"),
        ("score/tiny-ner", ONE | {"query": {"text": "a"}}, 404, "MODEL_NOT_FOUND", "rerankers"),
        ("extract/tiny-m3", ONE, 404, "MODEL_NOT_FOUND", "models with the task extract are"),
        ("encode/tiny-m3", {"items": []}, 400, "INVALID_INPUT", "The list items is empty"),
        ("encode/tiny-m3", {"items": [{"id": "a"}]}, 400, "INVALID_INPUT", "a text or one picture"),
        ("encode/tiny-clip", PICTURE, 400, "INVALID_INPUT", "picture"),
        (
            "encode/tiny-clip",
            {"items": [{"images": [{"data": "http://a/b.png"}]}]},
            *(400, "INVALID_INPUT", "base64"),
        ),
        (
            "encode/tiny-clip",
            {"items": [{"images": [{"data": 3}]}]},
            *(
                400,
                "INVALID_INPUT",
                "items[0].images[0].data: send the picture's file, in base64 in",
            ),
        ),
        (
            "encode/tiny-clip",
            {"items": [PICTURE["items"][0] | {"text": "a"}]},
            *(400, "INVALID_INPUT", "The field items[0]: send a text or one picture"),
        ),
        (
            "score/tiny-reranker",
            PICTURE | {"query": {"text": "a"}},
            400,
            "INVALID_INPUT",
            "no pictures",
        ),
        ("extract/tiny-ner", PICTURE, 400, "INVALID_INPUT", "[0].images: this is not supported"),
        ("encode/tiny-m3", {"items": [{"text": "a"}] * 41}, 400, "INVALID_INPUT", "at most 40 are"),
        ("encode/tiny-m3", PICTURE, 400, "INVALID_INPUT", "Tiny-m3 reads no pictures: send texts"),
        (
            "encode/tiny-m3",
            ONE | {"params": {"options": {"profile": "fast"}}},
            *(400, "INVALID_INPUT", "There is no field profile here: there are is_query, normal"),
        ),
        (
            "encode/tiny-m3",
            ONE | {"params": {"options": {"muvera": {"seed": 3}}}},
            *(400, "INVALID_INPUT", "The field params.options.muvera: Dictionary should have at"),
        ),
        (
            "encode/tiny-m3",
            ONE | {"params": {"options": {"normalize": False}}},
            *(400, "INVALID_INPUT", "has no effect on these vectors of tiny-m3"),
        ),
        (
            "extract/tiny-ner",
            ONE | {"params": {"labels": ["person"]}},
            *(400, "INVALID_INPUT", "its labels, with the aggregation simple, are PER, LOC, 2"),
        ),
        (
            "extract/tiny-ner",
            ONE | {"params": {"output_schema": {"a": 1}}},
            *(400, "INVALID_INPUT", "The field params.output_schema: this is not supported here"),
        ),
        ("encode/tiny-m3", [1] * 30_000, 400, "INVALID_INPUT", "more than 17408 values"),
        ("encode/tiny-m3", {"items": [{"text": b"a"}]}, 400, "INVALID_INPUT", "is 1 bytes: send a"),
    ],
)
def test_errors_have_the_codes_that_its_client_knows(
    client, path, body, status, code, message
) -> None:
    headers = {"content-type": MESSAGE_PACK, "accept": MESSAGE_PACK}
    answer = client.post(f"/v1/{path}", content=b"".join(pack(body)), headers=headers)
    detail = answer.json()["detail"]
    assert (answer.status_code, detail["code"]) == (status, code), answer.text
    assert message in detail["message"]
    assert detail["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("code", "status", "sent", "name"),
    [
        ("loading", 503, 503, "MODEL_LOADING"),
        ("model_not_loaded", 503, 502, "MODEL_LOAD_FAILED"),
        ("model_too_large", 503, 502, "MODEL_LOAD_FAILED"),
        ("out_of_memory", 503, 503, "RESOURCE_EXHAUSTED"),
        ("queue_full", 503, 503, "QUEUE_FULL"),
        ("draining", 503, 503, "QUEUE_FULL"),
        ("rate_limited", 429, 429, "RATE_LIMIT"),
        ("text_too_long", 422, 400, "INPUT_TOO_LONG"),
        ("invalid_request", 422, 400, "INVALID_INPUT"),
        ("kind_not_made", 400, 400, "INVALID_INPUT"),
        ("unauthorized", 401, 401, "UNAUTHORIZED"),
        ("timeout", 504, 504, "TIMEOUT"),
        ("internal_error", 500, 500, "INTERNAL_ERROR"),
    ],
)
def test_codes_let_its_client_retry_what_may_succeed(code, status, sent, name) -> None:
    body = SIE.error_body(ErrorFacts("A sentence.", code, status), "id")
    assert body == {"detail": {"code": name, "message": "A sentence.", "request_id": "id"}}
    assert SIE.statuses.get(code, status) == sent


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content-type": MESSAGE_PACK}, 400, "The body of 1 bytes is not MessagePack (byte 1"),
        ({"content-type": "application/x-msgpack"}, 400, "is not MessagePack"),
        ({"content-type": MESSAGE_PACK, "content-encoding": "gzip"}, 415, "send it uncompressed"),
        ({"content-type": "text/plain"}, 415, "The Content-Type is text/plain"),
        ({"content-type": "application/json"}, 400, "is not JSON"),
    ],
)
def test_other_bodies_are_refused(client, headers, status, message) -> None:
    answer = client.post("/v1/encode/tiny-m3", content=b"\xc1", headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["detail"]["message"]


def test_message_pack_is_read_on_its_paths_alone(client) -> None:
    content, headers = b"".join(pack({"sentences": ["a"]})), {"content-type": MESSAGE_PACK}
    assert client.post("/embeddings/", content=content, headers=headers).status_code == 415


def test_requests_are_counted_under_their_paths(client) -> None:
    series = {"status": "success", "endpoint": "/v1/encode"}
    before = metric(client, "embedding_requests_total", **series)
    scored = metric(client, "rerank_requests_total", status="success")
    encode(client)
    ask(client, "/v1/score/tiny-reranker", ONE | {"query": {"text": "a"}})
    assert metric(client, "embedding_requests_total", **series) == before + 1
    assert metric(client, "rerank_requests_total", status="success") == scored + 1
