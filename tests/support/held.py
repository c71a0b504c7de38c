"""Holds the device of a server (`tests.faults.faulty_server`), and fills the queue behind it."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.support.server import RunningServer

EMBED = ("/embeddings/", {"sentences": ["a"], "return_colbert": False})
RERANK = ("/rerank", {"query": "a", "passages": ["a"]})


@contextmanager
def held(hold: Path) -> Iterator[None]:
    """Keep the device from computing until the block ends, or `hold` is removed."""
    hold.touch()
    try:
        yield
    finally:
        hold.unlink(missing_ok=True)


@contextmanager
def full_queue(
    server: RunningServer,
    hold: Path,
    first: tuple[str, object] = EMBED,
    places: int = 1,
    headers: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Keep one request on the device, and fill the queue with `places` others."""
    with server.client(headers=headers) as client, ThreadPoolExecutor(places + 1) as threads:

        def begin(path: str, body: object):
            return threads.submit(client.post, path, json=body)

        before = server.metric("embedder_queue_wait_seconds_count")
        with held(hold):
            requests = [begin(*first)]
            server.wait_for_metric("embedder_queue_wait_seconds_count", before + 1)
            requests += [begin(*EMBED) for _ in range(places)]
            server.wait_for_metric("embedding_queue_size", places)
            yield
        assert {request.result().status_code for request in requests} == {200}
