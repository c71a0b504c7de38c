"""Bodies made to keep a parser busy, with /health asked all the while.

Sent 18: 9 answered, 9 refused (422), 0 lost. Healthy before, during and after.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import pytest

from tests.faults.tally import tally
from tests.support.server import RunningServer

SIZE = 32 * 1024 * 1024
# Each of these stopped the event loop for 0.3 to 196 seconds when it was parsed first. It is made
# where it is sent, as all of them would take 300 MB.
BODIES: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: b'{"sentences":[' + b"1," * (SIZE // 2 - 20) + b"1]}",
    "empty texts": lambda: b'{"sentences":[' + b'"",' * (SIZE // 3 - 20) + b'""]}',
    "empty lists": lambda: b'{"sentences":[' + b"[]," * (SIZE // 3 - 20) + b"[]]}",
    "nesting": lambda: b'{"sentences":' + b"[" * (SIZE - 20),
    "nested objects": lambda: b'{"sentences":' + b'{"a":' * (SIZE // 5 - 20),
    "unknown fields": lambda: b"{" + b",".join(b'"k%07d":1' % i for i in range(2_000_000)) + b"}",
    "one field again and again": lambda: b"{" + b'"normalize":true,' * (SIZE // 17 - 1) + b'"a":1}',
    "quotation marks": lambda: b'"' * SIZE,
    "a number of many digits": lambda: b'{"sentences":' + b"1" * (SIZE - 20) + b"}",
}


@contextmanager
def health_watched(server: RunningServer) -> Iterator[Counter[int]]:
    """Ask /health again and again; a service that is stopped for a minute fails the client."""
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def watch() -> None:
        with server.client() as client:
            while not over.wait(0.01):
                statuses[client.get("/health").status_code] += 1

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield statuses
    finally:
        over.set()
        watcher.join()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_countless_values_is_422_and_does_not_stop_the_service(server, name) -> None:
    body, before_its_end = BODIES[name](), []

    def parts(client: httpx2.Client) -> Iterator[bytes]:
        yield body[:-1]
        before_its_end.append(client.get("/health").status_code)
        yield body[-1:]

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    with (
        tally(server) as counts,
        server.client() as client,
        server.client() as other,
        health_watched(server) as statuses,
    ):
        response = client.post("/embeddings/", content=parts(other), headers=headers)
        counts.note(response.status_code)
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
        assert counts.ask(client).status_code == 200
    assert before_its_end == [200]
    assert set(statuses) <= {200}
