"""The client of the tools: retries after Retry-After, and errors."""

import http.server
import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.support.answering_http import Handler, answering, serving, url_of
from tools.service import Service, ServiceError

HEALTH = {"version": "2.0.0", "model": "m"}


class RateLimited(Handler):
    """Answers 429 with a Retry-After of one second, and 413, in turn."""

    def respond(self) -> None:
        self.answer(429 if next(self.server.count) % 2 else 413, Retry_After="1")
        self.close_connection = True


@contextmanager
def rate_limited() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RateLimited)
    server.count = itertools.count(1)
    with serving(server):
        yield url_of(server)


@pytest.mark.parametrize(
    ("options", "statuses", "waits"),
    [
        ({"timeout": 10}, [413, 413], [1, 1]),
        ({}, [413, 413], [1, 1]),
        # Retry-After is above the timeout, there is one attempt, or another status is retried.
        ({"timeout": 0.5}, [429, 413], []),
        ({"attempts": 1}, [429, 413], []),
        ({"retry_on": (503,)}, [429, 413], []),
    ],
)
def test_a_429_is_retried_after_retry_after(options, statuses, waits, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with rate_limited() as url, closing(Service(url, None, **options)) as service:
        answers = [service.get("/"), service.post("/", {})]
    assert [answer.status_code for answer in answers] == statuses
    assert slept == waits


@pytest.mark.parametrize(
    ("health", "message"),
    [
        (HEALTH | {"status": "loading", "reason": "so it is"}, "is not ready: so it is"),
        (HEALTH, "is no Smart Embedder"),
        ([], "is no Smart Embedder"),
    ],
)
def test_a_service_that_is_not_ready_or_refuses_is_an_error(health, message: str) -> None:
    with answering({"/health": health}) as url, closing(Service(url, None)) as service:
        with pytest.raises(ServiceError, match=message):
            service.require_ready()
        with pytest.raises(ServiceError, match=f"the service at {url} answered 404 no"):
            service.work("/embeddings/", {})


def test_a_service_that_cannot_be_reached_is_an_error() -> None:
    with closing(Service("http://127.0.0.1:9", None)) as service:
        with pytest.raises(ServiceError, match="cannot reach http://127.0.0.1:9: "):
            service.require_ready()
        with pytest.raises(ServiceError, match="does not answer: ConnectError"):
            service.work("/embeddings/", {})
