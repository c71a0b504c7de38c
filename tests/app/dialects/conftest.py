"""Services for the tests of dialects, and vectors of the native endpoint to compare with."""

from pathlib import Path

import httpx2
import pytest

from tests.app.conftest import answered, serving

TOKEN = "dialects-secret"
ALIASES = "text-embedding-3-small=tiny-qwen,rerank-v3.5=TINY-reranker"


@pytest.fixture(scope="module")
def full(tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path):
    """A client of a service with bge-m3, Qwen for dense vectors, a cross-encoder and a token."""
    with serving(
        embedding_model=str(tiny_m3),
        dense_embedding_model=str(tiny_qwen),
        reranker_model=str(tiny_reranker),
        model_aliases=ALIASES,
        api_token=TOKEN,
        max_sentences_per_request=40,
        max_rerank_passages=40,
        max_body_bytes=1_000_000,
        bge_embed_max_length=300,
        bge_rerank_max_length=300,
    ) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield client


def native(client: httpx2.Client, sentences: list[str], **options) -> list[dict]:
    """Return the vectors of the native endpoint."""
    body = {"sentences": sentences, "normalize_dense": True, "sparse_as_indices": True} | options
    return [item["embeddings"] for item in answered(client, "/embeddings/", **body)["data"]]


def dense(client: httpx2.Client, sentences: list[str], **options) -> list[list[float]]:
    """Return the dense vectors of the native endpoint."""
    options |= {"return_sparse": False, "return_colbert": False}
    return [vectors["dense"] for vectors in native(client, sentences, **options)]
