"""Every answer tells the spaces of its vectors, and a request may demand them."""

import json
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from safetensors import safe_open

from tests.api.conftest import answered, metric, serving
from tests.support.formats import ARROW, MSGPACK, SAFETENSORS

TEXT = "hybrid search"
# A path, a body, and the kinds in the answer.
WORK: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/embeddings/", {"sentences": [TEXT]}, ["dense", "sparse", "colbert"]),
    ("/embeddings/", {"sentences": [TEXT], "return_dense": False}, ["sparse", "colbert"]),
    ("/rerank", {"query": TEXT, "passages": [TEXT]}, ["dense", "sparse", "colbert"]),
    ("/v1/embeddings", {"input": TEXT}, ["dense"]),
    ("/v2/embed", {"texts": [TEXT], "input_type": "search_query"}, ["dense"]),
    ("/v2/rerank", {"query": TEXT, "documents": [TEXT]}, ["dense", "sparse", "colbert"]),
    ("/embed", {"inputs": TEXT}, ["dense"]),
    ("/embed_sparse", {"inputs": TEXT}, ["sparse"]),
    ("/score", {"text_1": TEXT, "text_2": [TEXT]}, ["dense", "sparse", "colbert"]),
    ("/similarity", {"inputs": {"source_sentence": TEXT, "sentences": [TEXT]}}, ["dense"]),
    ("/api/v1/embed", {"inputs": TEXT}, ["dense"]),
]


@pytest.fixture(scope="module")
def client(tiny_m3: Path, tiny_qwen: Path):
    """Of a service whose dense vectors come from another model than the rest."""
    with serving(embedding_model=str(tiny_m3), dense_embedding_model=str(tiny_qwen)) as client:
        yield client


@pytest.fixture(scope="module")
def known(client) -> dict[str, str]:
    """The ids that the service tells of its models."""
    told = client.get("/health").json()["models"]
    assert [each["vector_space"].keys() >= {"dense"} for each in told] == [True, True]
    rest, dense = (each["vector_space"] for each in told)
    return rest | dense


def spaces_in(header: str) -> dict[str, str]:
    return {each.partition("-")[0]: each for each in header.split(", ")}


@pytest.mark.parametrize(("path", "body", "kinds"), WORK)
def test_the_spaces_stand_in_the_header_of_every_dialect(client, known, path, body, kinds) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told = spaces_in(answer.headers["vector-space"])
    assert [*told] == kinds
    assert {kind: told[kind] for kind in kinds if kind != "dense"} == {
        kind: known[kind] for kind in kinds if kind != "dense"
    }


def test_an_answer_tells_the_space_and_the_precision_of_each_kind(client, known) -> None:
    told = answered(client, "/embeddings/", sentences=[TEXT], return_colbert=False)
    assert told["vector_space"] == {
        "dense": known["dense"], "sparse": known["sparse"], "colbert": None,
    }  # fmt: skip
    assert {*told["precision"]} == {"dense", "sparse", "colbert"}
    assert told["precision"]["dense"].startswith("float32/")
    assert told["precision"]["colbert"] is None


def test_models_and_info_tell_it_too(client, known) -> None:
    models = client.get("/v1/models").json()["data"]
    assert {models[0]["vector_space"]["sparse"], known["sparse"]} == {known["sparse"]}
    assert client.get("/info").json()["vector_space"] == {"dense": known["dense"]}


def report_of(content: bytes, media_type: str, path: Path) -> dict[str, Any]:
    """What an answer in a binary format holds beside its vectors."""
    if media_type == MSGPACK:
        return msgpack.unpackb(content)
    if media_type == ARROW:
        metadata = pa.ipc.open_stream(content).schema.metadata
        return json.loads(metadata[b"smart-embedder"])
    (path / "answer.safetensors").write_bytes(content)
    with safe_open(path / "answer.safetensors", "numpy") as file:
        return json.loads(file.metadata()["smart-embedder"])


@pytest.mark.parametrize("media_type", [ARROW, MSGPACK, SAFETENSORS])
@pytest.mark.parametrize("path", ["/embeddings/", "/embeddings/stream"])
def test_binary_formats_tell_it_in_their_metadata(
    client, known, tmp_path, path, media_type
) -> None:
    line, about = {"text": TEXT}, {"content-type": "application/x-ndjson", "accept": media_type}
    if path == "/embeddings/":
        answer = client.post(path, json={"sentences": [TEXT]}, headers={"accept": media_type})
    elif media_type == MSGPACK:
        pytest.skip("a stream of records has no place for it but the header")
    else:
        answer = client.post(path, content=json.dumps(line), headers=about)
    assert answer.status_code == 200, answer.text
    assert spaces_in(answer.headers["vector-space"]) == known
    assert report_of(answer.content, media_type, tmp_path)["vector_space"] == known


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {}),
        ({"dimensions": 32}, {"normalisation": ("raw", "unit"), "dimensions": ("64", "32")}),
        ({"normalize_dense": True}, {"normalisation": ("raw", "unit")}),
        ({"truncation_side": "left"}, {"truncation": ("end", "start")}),
    ],
)
def test_what_a_request_changes_is_another_space(client, known, options, changed) -> None:
    told = answered(client, "/embeddings/", sentences=[TEXT], **options)["vector_space"]["dense"]
    expected = known["dense"]
    for old, new in changed.values():
        expected = new.join(expected.rsplit(old, 1))
    assert told == expected


@pytest.mark.parametrize(("path", "body", "kinds"), WORK)
def test_vectors_of_another_space_are_refused_before_any_work(client, path, body, kinds) -> None:
    own = client.post(path, json=body).headers["vector-space"]
    assert client.post(path, json=body, headers={"if-vector-space": own}).status_code == 200
    done = (
        metric(client, "embedding_batch_size_count"),
        metric(client, "embedder_batch_tokens_count"),
    )
    kind = kinds[-1]
    first, *parts = spaces_in(own)[kind].split("-")
    other = "-".join([first, "elsewhere", *parts[1:]])
    refused = client.post(path, json=body, headers={"if-vector-space": other})
    assert refused.status_code == 412, refused.text
    assert f"{kind}: weights: {parts[0]}, was elsewhere (here {first}-" in refused.text
    assert "vector-space" not in refused.headers
    assert (
        metric(client, "embedding_batch_size_count"), metric(client, "embedder_batch_tokens_count"),
    ) == done  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "status", "code"),
    [
        ("{dense}", 200, None),
        ("{dense}, {sparse}", 200, None),
        ("{colbert}, {dense}", 200, None),
        ("{colbert}", 422, "invalid_request"),
        ("{dense}, dense", 422, "invalid_request"),
        ("score-a-b-c-d-e-f-g-h", 422, "invalid_request"),
        ("dense-a-b-c-d-e-f-g-\x7f", 422, "invalid_request"),
        ("dense-a-b-c-d-e-f-g-h", 412, "vector_space_differs"),
        ("dense-a-b-c-d-e-f-g-h, " * 1000, 422, "invalid_request"),
    ],
)
@pytest.mark.parametrize("place", ["header", "field"])
def test_ids_are_compared_with_the_kinds_of_the_answer(client, known, ids, status, code, place):
    ids = ids.format(**known)
    body: dict[str, Any] = {"sentences": [TEXT], "return_colbert": False}
    headers = {}
    if place == "header":
        headers["if-vector-space"] = ids
    else:
        body["if_vector_space"] = ids
    answer = client.post("/embeddings/", json=body, headers=headers)
    assert (answer.status_code, answer.json().get("code")) == (status, code), answer.text


def test_a_stream_in_another_space_does_not_begin(client) -> None:
    headers = {"content-type": "application/x-ndjson", "if-vector-space": "dense-a-b-c-d-e-f-g-h"}
    answer = client.post("/embeddings/stream", content='{"text": "a"}', headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (412, "vector_space_differs")
    del headers["if-vector-space"]
    query = {"if_vector_space": "dense-a-b-c-d-e-f-g-h"}
    answer = client.post(
        "/embeddings/stream", params=query, content='{"text": "a"}', headers=headers
    )
    assert answer.status_code == 412
