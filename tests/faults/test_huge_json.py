"""Bodies made to keep a parser busy, with /health asked all the while.

Sent 18: 9 answered, 9 refused (422), 0 lost. Healthy before, during and after.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.tally import tally
from tests.support.server import RunningServer

SIZE = 32 * 1024 * 1024
# Each of these stopped the event loop for 0.3 to 196 seconds when it was parsed first.
BODIES = {
    "numbers": b'{"sentences":[' + b"1," * (SIZE // 2 - 20) + b"1]}",
    "empty texts": b'{"sentences":[' + b'"",' * (SIZE // 3 - 20) + b'""]}',
    "empty lists": b'{"sentences":[' + b"[]," * (SIZE // 3 - 20) + b"[]]}",
    "nesting": b'{"sentences":' + b"[" * (SIZE - 20),
    "nested objects": b'{"sentences":' + b'{"a":' * (SIZE // 5 - 20),
    "unknown fields": b"{" + b",".join(b'"k%07d":1' % i for i in range(2_000_000)) + b"}",
    "one field again and again": b"{" + b'"normalize":true,' * (SIZE // 17 - 1) + b'"a":1}',
    "quotation marks": b'"' * SIZE,
    "a number of many digits": b'{"sentences":' + b"1" * (SIZE - 20) + b"}",
}


@contextmanager
def health_watched(server: RunningServer) -> Iterator[list[float]]:
    """Ask /health again and again; the list holds the seconds that each answer took."""
    seconds: list[float] = []
    over = threading.Event()

    def watch() -> None:
        with server.client() as client:
            while not (seconds and over.wait(0.01)):
                started = time.perf_counter()
                assert client.get("/health").status_code == 200
                seconds.append(time.perf_counter() - started)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seconds
    finally:
        over.set()
        watcher.join()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_countless_values_is_422_and_does_not_stop_the_service(server, name) -> None:
    with tally(server) as counts, server.client() as client, health_watched(server) as seconds:
        response = client.post(
            "/embeddings/", content=BODIES[name], headers={"Content-Type": "application/json"}
        )
        counts.note(response.status_code)
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
        assert counts.ask(client).status_code == 200
    assert max(seconds) < 2
