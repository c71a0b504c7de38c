"""One server for all clients: bge-m3 and bge-reranker under the names of the hub, and a token."""

from pathlib import Path

import pytest

from tests.support.server import RunningServer, run_server

TOKEN = "my-token"
MOST_TEXTS = 40


@pytest.fixture(scope="session")
def clients_server(tiny_m3: Path, tiny_reranker: Path, tmp_path_factory):
    settings = {
        "EMBEDDING_MODEL": str(tiny_m3),
        "RERANKER_MODEL": str(tiny_reranker),
        "MODEL_ALIASES": "BAAI/bge-m3=tiny-m3,BAAI/bge-reranker-v2-m3=tiny-reranker",
        "API_TOKEN": TOKEN,
        "MAX_SENTENCES_PER_REQUEST": str(MOST_TEXTS),
        "MAX_RERANK_PASSAGES": str(MOST_TEXTS),
    }
    with run_server(tmp_path_factory.mktemp("clients"), **settings) as running:
        running.wait_until_healthy()
        yield running


@pytest.fixture(scope="module")
def native(clients_server: RunningServer):
    """A client of the native endpoints."""
    with clients_server.client(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client
