"""The service in this process, its clients, and numbers of the engine to compare with."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Settings

_START_LIMIT = 500.0


@contextmanager
def serving(**settings: Any) -> Iterator[TestClient]:
    """A client of a service that has loaded these models, as its process would.

    For a file's tests at most: its thread that watches the loop would write into the log that
    other tests check.
    """
    own: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    # A busy machine may give the process no core for a while.
    own |= {"reranker_model": "late-interaction", "request_timeout": 600}
    # All requests of a test come from one address.
    own |= dict.fromkeys(("rate_limit_requests_per_minute", "rate_limit_burst_size"), 1_000_000)
    over, failures = threading.Event(), list[BaseException]()

    def fail(error: BaseException) -> None:
        failures.append(error)
        over.set()

    chosen = Settings.model_validate(own | settings)
    app = create_app(chosen, on_settled=over.set, on_failure=fail)
    with TestClient(app, client=("127.0.0.1", 1)) as client:
        assert over.wait(_START_LIMIT)
        assert failures == []
        yield client


def metric(client: TestClient, series: str, **labels: str) -> float:
    """The present value of a series of the client's service."""
    value: float = client.app.state.service.metrics.value(series, **labels)
    return value


@pytest.fixture(scope="module")
def client(tiny_m3: Path):
    """Of a service without a token, whose only model is bge-m3's kind.

    It reads 2,048 tokens: 8,192, to which texts that are cut would be cut, take 16 times as long.
    """
    with serving(embedding_model=str(tiny_m3), bge_embed_max_length=2048) as client:
        yield client


def answered(client: httpx2.Client, path: str, **body: Any) -> Any:
    """The answer to a body that must be answered."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()
