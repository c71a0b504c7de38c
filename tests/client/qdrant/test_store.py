"""Compare the vectors of the service with those of a collection."""

from dataclasses import replace

import pytest
from smart_embedder_client.qdrant.store import Layout, VectorConfig, find_differences, make_layout

WANTED = make_layout(1024, 1024, sparse=True, datatype="float32")


def with_dense(**changes: object) -> Layout:
    dense = replace(WANTED.vectors["dense"], **changes)  # type: ignore[arg-type]
    return replace(WANTED, vectors={**WANTED.vectors, "dense": dense})


def test_collection_may_have_additional_vectors() -> None:
    more = replace(
        WANTED,
        vectors={**WANTED.vectors, "image": VectorConfig(512, "Dot")},
        sparse={**WANTED.sparse, "bm25": "idf"},
    )
    assert [*find_differences(WANTED, more)] == []
    # The number of bge-m3's vectors that fit into a point.
    assert WANTED.max_colbert_vectors == 1023


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (with_dense(size=768), "its vector dense is 768 numbers (Cosine, float32), and 1024"),
        (with_dense(distance="Dot"), "its vector dense is 1024 numbers (Dot, float32), and 1024"),
        (with_dense(datatype="uint8"), "its vector dense is 1024 numbers (Cosine, uint8), and"),
        (with_dense(is_multivector=True), "its vector dense is multivector of 1024 numbers"),
        (replace(WANTED, sparse={"sparse": "idf"}), "sparse vector sparse has the modifier idf"),
        (replace(WANTED, sparse={}), "it has no sparse vector sparse"),
        (make_layout(1024, None, sparse=True, datatype="float32"), "it has no vector colbert"),
    ],
)
def test_every_difference_is_named(found: Layout, message: str) -> None:
    (problem,) = find_differences(WANTED, found)
    assert message in problem
