"""Servers for all clients: bge-m3 and bge-reranker under the names of the hub, and a token."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.clients.client_process import EXAMPLES, client_process
from tests.clients.expected import MOST_TEXTS
from tests.clients.recorder import recorder
from tests.support import held
from tests.support.held import EMBED, RERANK
from tests.support.server import RunningServer

TOKEN = "my-token"
TEXTS = ["hybrid search", "What is bread?", "рiver жизнь 检索", "vector " * 30]
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="session")
def settings(tiny_reranker: Path) -> dict[str, str]:
    return {
        "RERANKER_MODEL": str(tiny_reranker),
        "MODEL_ALIASES": "BAAI/bge-m3=tiny-m3,BAAI/bge-reranker-v2-m3=tiny-reranker",
        "API_TOKEN": TOKEN,
    }


@pytest.fixture(scope="session")
def clients_server(settings: dict[str, str], hold: Path, serve):
    """A server whose queues hold one request each."""
    limits = {
        "MAX_SENTENCES_PER_REQUEST": str(MOST_TEXTS),
        "MAX_RERANK_PASSAGES": str(MOST_TEXTS),
        "MAX_QUEUE_SIZE": "1",
        "RERANK_MAX_QUEUE": "1",
        "HOLD": str(hold),
    }
    with serve("tests.faults.faulty_server", **settings, **limits) as running:
        yield running


@pytest.fixture(scope="session")
def limited_server(settings: dict[str, str], serve):
    """A server that allows one request, then one every three seconds."""
    limits = {"RATE_LIMIT_BURST_SIZE": "1", "RATE_LIMIT_REQUESTS_PER_MINUTE": "20"}
    with serve(**settings, **limits) as running:
        yield running


@pytest.fixture(scope="module")
def native(clients_server: RunningServer):
    """A client of the native endpoints."""
    with native_client(clients_server) as client:
        yield client


def native_client(server: RunningServer) -> httpx2.Client:
    return server.client(headers=AUTHORIZED)


def rejected(server: RunningServer, reason: str) -> float:
    """Count the requests of both kinds that were refused for this reason."""
    kinds = ("embedding", "rerank")
    return sum(
        server.metric(f'{kind}_requests_rejected_total{{reason="{reason}"}}') for kind in kinds
    )


@contextmanager
def use_up_rate_limit(server: RunningServer) -> Iterator[str]:
    """Return an address of the server, at which the rate limit refuses the first request."""

    def use_up() -> None:
        path, body = EMBED
        with native_client(server) as client:
            while client.post(path, json=body).status_code != 429:
                pass

    with recorder(server.url, use_up) as proxy:
        yield proxy.url


def full_queue(server: RunningServer, hold: Path) -> AbstractContextManager[None]:
    """Have every place taken until the block ends or `hold` is removed.

    The device holds the one rerank request that is accepted; an embedding request waits behind it.
    """
    return held.full_queue(server, hold, RERANK, headers=AUTHORIZED)


@pytest.fixture(scope="module")
def process(name: str):
    """The process of the client that the module's fixture `name` names."""
    with client_process(EXAMPLES[name]) as running:
        yield running
