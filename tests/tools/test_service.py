"""A service as the tools ask it: when they wait, and what they say where it does not answer."""

import http.server
import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.support.answering_http import Handler, answering, serving, url_of
from tools.service import Service, ServiceError

HEALTH = {"version": "2.0.0", "model": "m"}


class OverItsRate(Handler):
    """Refuses every other request, with a Retry-After of one second."""

    def respond(self) -> None:
        self.answer(429 if next(self.server.count) % 2 else 413, Retry_After="1")
        self.close_connection = True


@contextmanager
def over_its_rate() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OverItsRate)
    server.count = itertools.count(1)
    with serving(server):
        yield url_of(server)


@pytest.mark.parametrize(
    ("how", "statuses", "waits"),
    [
        ({"timeout": 10}, [413, 413], [1, 1]),
        ({}, [413, 413], [1, 1]),
        # Longer than an answer may take, one try only, and a status that is not waited for.
        ({"timeout": 0.5}, [429, 413], []),
        ({"tries": 1}, [429, 413], []),
        ({"later": (503,)}, [429, 413], []),
    ],
)
def test_it_waits_as_long_as_it_is_told(how, statuses, waits, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with over_its_rate() as url, closing(Service(url, None, **how)) as service:
        answers = [service.get("/"), service.post("/", {})]
    assert [answer.status_code for answer in answers] == statuses
    assert slept == waits


@pytest.mark.parametrize(
    ("health", "told"),
    [
        (HEALTH | {"status": "loading", "reason": "so it is"}, "is not ready: so it is"),
        (HEALTH, "is no Smart Embedder"),
        ([], "is no Smart Embedder"),
    ],
)
def test_a_service_that_does_no_work_is_told_in_a_sentence(health, told: str) -> None:
    with answering({"/health": health}) as url, closing(Service(url, None)) as service:
        with pytest.raises(ServiceError, match=told):
            service.require_ready()
        with pytest.raises(ServiceError, match=f"the service at {url} answered 404 no"):
            service.work("/embeddings/", {})


def test_a_service_that_is_away_is_told_in_a_sentence() -> None:
    with closing(Service("http://127.0.0.1:9", None)) as service:
        with pytest.raises(ServiceError, match="cannot reach http://127.0.0.1:9: "):
            service.require_ready()
        with pytest.raises(ServiceError, match="does not answer: ConnectError"):
            service.work("/embeddings/", {})
