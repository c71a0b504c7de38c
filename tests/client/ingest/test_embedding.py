"""Embed chunks: pool too many ColBERT vectors, and divide refused batches."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from smart_embedder_client import AsyncClient, SmartEmbedderError
from smart_embedder_client.ingest.embedding import Embedder, Refusal, VectorOptions
from smart_embedder_client.ingest.options import Report
from smart_embedder_client.ingest.pace import Patience

from tests.support.server import RunningServer

ALL = VectorOptions(frozenset({"dense", "sparse", "colbert"}), "float32")


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, max_retries=0) as client:
        yield client


def embedder(
    client: AsyncClient,
    options: VectorOptions = ALL,
    max_vectors: int | None = None,
    report: Report | None = None,
) -> Embedder:
    patience = Patience(30, lambda _: None)
    return Embedder(client, options, patience, max_vectors, report or Report())


async def test_pooling_of_texts_with_too_many_colbert_vectors(client: AsyncClient) -> None:
    texts = ["the river", "search " * 40]
    report = Report()
    short, long = await embedder(client, max_vectors=15, report=report).embed(texts)
    full = await client.embed(texts, return_colbert=True)
    pooled = await client.embed(texts[1:], return_colbert=True, colbert_pool_factor=3)
    assert report.pooled == 1
    np.testing.assert_array_equal(short.colbert, full.colbert[0])
    np.testing.assert_array_equal(long.colbert, pooled.colbert[0])
    np.testing.assert_allclose(long.dense, full.dense[1], atol=1e-5)
    # If needed, the pool factor is larger than requested.
    options = VectorOptions(ALL.kinds, "float32", colbert_pool_factor=2)
    (found,) = await embedder(client, options, max_vectors=10).embed(["search " * 60])
    assert 5 < len(found.colbert) <= 10


async def test_refused_batch_is_sent_in_halves(client: AsyncClient) -> None:
    """The service takes 1,024 texts per request."""
    options = VectorOptions(frozenset({"dense"}), "float16")
    found = await embedder(client, options).embed(["river"] * 1500)
    assert len(found) == 1500
    assert not any(isinstance(result, Refusal) for result in found)
    assert found[0].dense.dtype == np.float16


async def test_refused_text_does_not_affect_the_others(server: RunningServer) -> None:
    """An unsupported dimension stands for any refusal."""

    class Refusing(AsyncClient):
        async def embed(self, texts, **options):  # type: ignore[no-untyped-def, override]
            return await super().embed(texts, **options, dimensions=3 if "bad" in texts else None)

    async with Refusing(server.url, max_retries=0) as client:
        found = await embedder(client).embed(["river", "bad", "winter"])
    assert [isinstance(result, Refusal) for result in found] == [False, True, False]
    assert "dimensions" in found[1].reason


async def test_text_without_tokens_has_no_sparse_vector(client: AsyncClient) -> None:
    (found,) = await embedder(client).embed(["\u200b"])
    assert found.sparse is None
    assert len(found.colbert) > 0


async def test_wrong_token_401_is_not_retried(client: AsyncClient) -> None:
    async def attempt() -> None:
        raise SmartEmbedderError("no", "unauthorized", 401)

    with pytest.raises(SmartEmbedderError):
        await Patience(3600, lambda _: None).wait_for(attempt)


async def test_another_vector_space_ends_the_run_and_is_no_refusal(client: AsyncClient) -> None:
    options = VectorOptions(frozenset({"dense"}), "float32", spaces=["dense-0123456789ab"])
    for texts in (["river"], ["river", "winter"]):
        with pytest.raises(SmartEmbedderError, match="412 vector_space_differs"):
            await embedder(client, options).embed(texts)
