"""Embed chunks: pool too many ColBERT vectors, and divide refused batches."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from smart_embedder_client import AsyncClient, EmbedOptions, SmartEmbedderError
from smart_embedder_client.ingest.embedding import Embedder
from smart_embedder_client.ingest.options import Report
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.qdrant.store import KINDS, vector_options

from tests.support.server import RunningServer

ALL = vector_options(KINDS, "float32", [])


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, max_retries=0) as client:
        yield client


def embedder(
    client: AsyncClient,
    options: EmbedOptions = ALL,
    max_vectors: int | None = None,
    report: Report | None = None,
) -> Embedder:
    patience = Patience(30, pytest.fail)
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
    # A text with as many vectors as fit is not pooled.
    await embedder(client, max_vectors=len(full.colbert[0]), report=report).embed(texts[:1])
    assert report.pooled == 1
    # If needed, the pool factor is larger than requested.
    options: EmbedOptions = {**ALL, "colbert_pool_factor": 2}
    (found,) = await embedder(client, options, max_vectors=10).embed(["search " * 60])
    assert 5 < len(found.colbert) <= 10


async def test_refused_text_does_not_affect_the_others(client: AsyncClient) -> None:
    """Halves are sent before a batch is tried again, whatever the service says of one text."""
    codes = {
        "long": (422, "text_too_long"),
        "huge": (503, "out_of_memory"),
        "odd": (500, "internal_error"),
    }

    class Refusing(AsyncClient):
        async def embed(self, texts, **options):  # type: ignore[no-untyped-def, override]
            if len(texts) > 1 and "slow" in texts:
                raise SmartEmbedderError("too slow", "timeout", 504)
            for text in codes.keys() & {*texts}:
                raise SmartEmbedderError(text, codes[text][1], codes[text][0])
            return await client.embed(texts, **options)

    texts = ["river", "long", "slow", "winter", "huge", "bread", "odd"]
    async with Refusing("http://127.0.0.1:1") as refusing:
        found = await embedder(refusing).embed(texts)
    expected = await client.embed(texts)
    for index, (text, result) in enumerate(zip(texts, found, strict=True)):
        if text in codes:
            assert isinstance(result, SmartEmbedderError)
            assert result.code == codes[text][1]
        else:
            np.testing.assert_allclose(result.dense, expected.dense[index], atol=1e-5)


async def test_text_without_tokens_has_no_sparse_vector(client: AsyncClient) -> None:
    (found,) = await embedder(client).embed(["\u200b"])
    assert found.sparse is None
    assert len(found.colbert) > 0


async def test_wrong_token_401_is_not_retried() -> None:
    async def attempt() -> None:
        raise SmartEmbedderError("no", "unauthorized", 401)

    with pytest.raises(SmartEmbedderError):
        await Patience(3600, lambda _: None).wait_for(attempt)


async def test_another_vector_space_ends_the_run_and_is_no_refusal(client: AsyncClient) -> None:
    options = vector_options({"dense"}, "float32", ["dense-0123456789ab"])
    for texts in (["river"], ["river", "winter"]):
        with pytest.raises(SmartEmbedderError, match="412 vector_space_differs"):
            await embedder(client, options).embed(texts)
