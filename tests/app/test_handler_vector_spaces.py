"""Every response has the ids of its vector spaces, and a request may require them."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import answered, metric, serving
from tests.support.formats import SAFETENSORS, from_safetensors

TEXT = "hybrid search"
# A path, a body, and the kinds in the response.
WORK: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/embeddings/", {"sentences": [TEXT]}, ["dense", "sparse", "colbert"]),
    ("/embeddings/", {"sentences": [TEXT], "return_dense": False}, ["sparse", "colbert"]),
    ("/rerank", {"query": TEXT, "passages": [TEXT]}, ["dense", "sparse", "colbert"]),
    ("/v1/embeddings", {"input": TEXT}, ["dense"]),
    ("/v2/embed", {"texts": [TEXT], "input_type": "search_query"}, ["dense"]),
    ("/v2/rerank", {"query": TEXT, "documents": [TEXT]}, ["dense", "sparse", "colbert"]),
    ("/embed", {"inputs": TEXT}, ["dense"]),
    ("/embed_sparse", {"inputs": TEXT}, ["sparse"]),
    ("/api/v1/embed", {"inputs": TEXT}, ["dense"]),
]


@pytest.fixture(scope="module")
def client(tiny_m3: Path, tiny_qwen: Path):
    """A client of a service with another model for dense vectors."""
    with serving(embedding_model=str(tiny_m3), dense_embedding_model=str(tiny_qwen)) as client:
        yield client


@pytest.fixture(scope="module")
def known(client) -> dict[str, str]:
    """The ids of the vector spaces of both models, by kind."""
    models = client.get("/health").json()["models"]
    assert [model["vector_space"].keys() >= {"dense"} for model in models] == [True, True]
    rest, dense = (model["vector_space"] for model in models)
    return rest | dense


def spaces_in(header: str) -> dict[str, str]:
    return {space.partition("-")[0]: space for space in header.split(", ")}


@pytest.mark.parametrize(("path", "body", "kinds"), WORK)
def test_vector_spaces_are_in_the_header_and_others_get_412_before_any_work(
    client, known, path, body, kinds
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    own = answer.headers["vector-space"]
    spaces = spaces_in(own)
    assert [*spaces] == kinds
    for kind in set(kinds) - {"dense"}:
        assert spaces[kind] == known[kind]
    assert client.post(path, json=body, headers={"if-vector-space": own}).status_code == 200
    series = ("embedding_batch_size_count", "embedder_batch_tokens_count")
    done = [metric(client, name) for name in series]
    kind = kinds[-1]
    other = f"{kind}-0123456789ab"
    refused = client.post(path, json=body, headers={"if-vector-space": other})
    assert refused.status_code == 412, refused.text
    assert f"{spaces[kind]} here, wanted {other}" in refused.text
    assert "vector-space" not in refused.headers
    assert [metric(client, name) for name in series] == done


def test_a_response_models_and_info_have_the_vector_space_of_each_kind(client, known):
    response = answered(client, "/embeddings/", sentences=[TEXT], return_colbert=False)
    assert response["vector_space"] == {
        "dense": known["dense"], "sparse": known["sparse"], "colbert": None,
    }  # fmt: skip
    assert all(re.fullmatch(f"{kind}-[0-9a-f]{{12}}", known[kind]) for kind in known)
    models = client.get("/v1/models").json()["data"]
    assert models[0]["vector_space"]["sparse"] == known["sparse"]
    assert client.get("/info").json()["vector_space"] == {"dense": known["dense"]}


def test_safetensors_have_the_vector_space_in_their_metadata(client, known) -> None:
    headers = {"accept": SAFETENSORS}
    answer = client.post("/embeddings/", json={"sentences": [TEXT]}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert spaces_in(answer.headers["vector-space"]) == known
    _, metadata = from_safetensors(answer.content)
    assert metadata["vector_space"] == known


def test_options_that_change_vectors_change_the_vector_space(client, known) -> None:
    left, unit = {"truncation_side": "left"}, {"normalize_dense": True}
    changed = [{}, {"dimensions": 32}, {"dimensions": 48}, unit, left, left | unit]
    found = [
        answered(client, "/embeddings/", sentences=[TEXT], **options)["vector_space"]["dense"]
        for options in changed
    ]
    assert found[0] == known["dense"]
    assert len({*found}) == len(changed)
    # Fewer dimensions are always normalized.
    options = {"dimensions": 32, "normalize_dense": True}
    response = answered(client, "/embeddings/", sentences=[TEXT], **options)
    assert response["vector_space"]["dense"] == found[1]


@pytest.mark.parametrize(
    ("ids", "status", "code"),
    [
        ("{dense}", 200, None),
        ("{colbert}, {dense}", 200, None),
        ("{colbert}", 422, "invalid_request"),
        ("{dense}, dense", 412, "vector_space_differs"),
        ("{dense}, density-0123456789ab", 422, "invalid_request"),
        ("dense-0123456789ab", 412, "vector_space_differs"),
        ("{sparse}, dense-0123456789ab", 412, "vector_space_differs"),
        ("dense-0123456789ab, " * 1000, 422, "invalid_request"),
    ],
)
def test_if_vector_space_is_compared_with_the_kinds_of_the_response(
    client, known, ids, status, code
) -> None:
    ids = ids.format(**known)
    body: dict[str, Any] = {"sentences": [TEXT], "return_colbert": False}
    for answer in (
        client.post("/embeddings/", json=body, headers={"if-vector-space": ids}),
        client.post("/embeddings/", json=body | {"if_vector_space": ids}),
    ):
        assert (answer.status_code, answer.json().get("code")) == (status, code), answer.text


def test_a_long_vector_space_id_of_an_earlier_version_is_explained(client, known) -> None:
    long = "dense-w-t-cls-none-unit-none-512end-384"
    headers = {"if-vector-space": long}
    answer = client.post("/embeddings/", json={"sentences": [TEXT]}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (412, "vector_space_differs")
    explained = "If-Vector-Space names a long id of an earlier version, and ids are short now: "
    assert answer.json()["detail"].startswith(
        f"{explained}{known['dense']} here, wanted {long}. If"
    )
