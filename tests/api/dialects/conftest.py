"""Servers for all dialects: the shared one, one with every model and a token, one with others."""

from pathlib import Path

import httpx2
import pytest
from transformers import BertForMaskedLM, BertForSequenceClassification

from tests.api.conftest import answered
from tests.support.server import RunningServer, run_server
from tests.support.wordpiece import save_model, save_splade

TOKEN = "dialects-secret"
LABELS = ("contradiction", "entailment", "neutral")
ALIASES = "text-embedding-3-small=tiny-qwen,rerank-v3.5=TINY-reranker"


@pytest.fixture(scope="session")
def full_server(tiny_m3: Path, tiny_qwen: Path, tiny_reranker: Path, tmp_path_factory):
    """Qwen makes dense vectors, and a cross-encoder reranks."""
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "DENSE_EMBEDDING_MODEL": str(tiny_qwen),
        "RERANKER_MODEL": str(tiny_reranker),
        "MODEL_ALIASES": ALIASES,
        "API_TOKEN": TOKEN,
        "MAX_SENTENCES_PER_REQUEST": "40",
        "MAX_RERANK_PASSAGES": "40",
        "MAX_BODY_BYTES": "1000000",
        "BGE_EMBED_MAX_LENGTH": "300",
    }
    with run_server(tmp_path_factory.mktemp("full"), **settings) as running:
        running.wait_until_healthy()
        yield running


@pytest.fixture(scope="module")
def full(full_server: RunningServer):
    """A client of it that sends the token."""
    with full_server.client(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client


@pytest.fixture(scope="session")
def tiny_nli(tmp_path_factory) -> Path:
    """A cross-encoder with the labels of natural language inference."""
    folder = tmp_path_factory.mktemp("classifier") / "tiny-nli"
    return save_model(folder, BertForSequenceClassification, id2label=dict(enumerate(LABELS)))


@pytest.fixture(scope="session")
def tiny_splade(tmp_path_factory) -> Path:
    """A masked language model that makes sparse vectors."""
    return save_splade(tmp_path_factory.mktemp("sparse") / "tiny-splade", BertForMaskedLM)


@pytest.fixture(scope="session")
def heads_server(tiny_splade: Path, tiny_m3: Path, tiny_nli: Path, tmp_path_factory):
    """SPLADE makes sparse vectors, bge-m3's kind dense ones, and a classifier reranks."""
    settings = {
        "EMBEDDING_MODEL": str(tiny_splade),
        "DENSE_EMBEDDING_MODEL": str(tiny_m3),
        "RERANKER_MODEL": str(tiny_nli),
    }
    with run_server(tmp_path_factory.mktemp("heads"), **settings) as running:
        running.wait_until_healthy()
        yield running


@pytest.fixture(scope="module")
def heads(heads_server: RunningServer):
    """A client of it."""
    with heads_server.client() as client:
        yield client


def native(client: httpx2.Client, sentences: list[str], **options) -> list[dict]:
    """The vectors of the native endpoint."""
    body = {"sentences": sentences, "normalize_dense": True, "sparse_as_indices": True} | options
    return [item["embeddings"] for item in answered(client, "/embeddings/", **body)["data"]]
