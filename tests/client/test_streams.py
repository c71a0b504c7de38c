"""`embed_stream`: the vectors of `embed`, text by text, also after failures."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from smart_embedder_client import Client, SmartEmbedderError, StreamedText
from smart_embedder_client.sending import OPEN_PAGES
from smart_embedder_client.streams import Pace, read_pages

from tests.support.relay import Relay
from tests.support.texts import varied_texts

TEXTS = varied_texts(60)
MANY = [f"{text} {i}"[:200] for i, text in enumerate(TEXTS * 12)]


@pytest.fixture
def collect(connect):
    """Collects all records of a stream, with texts from a synchronous or asynchronous iterator."""

    async def slowly(texts: list[Any]) -> AsyncIterator[Any]:
        for text in texts:
            yield text

    def run(url: str, texts: list[Any], **options: Any) -> list[StreamedText]:
        with connect(url) as client:
            source = iter(texts) if isinstance(client, Client) else slowly(texts)
            return list(client.embed_stream(source, **options))

    return run


def test_stream_vectors_equal_those_of_embed(server, collect) -> None:
    full = {"muvera": "document", "return_tokens": True}
    scaled = {"output_dtype": "int8", "return_sparse": False, "return_colbert": True}
    for options, step in ((full, 1e-5), (scaled, 1)):
        found = collect(server.url, TEXTS, **options)
        with Client(server.url) as client:
            expected = client.embed(TEXTS, **options)
        assert [record.text for record in found] == TEXTS
        for i, record in enumerate(found):
            assert (record.id, record.error) == (i, None)
            for kind in ("dense", "colbert", "muvera", "dense_scale", "colbert_scale"):
                whole = getattr(expected, kind)
                if whole is None:
                    assert getattr(record, kind) is None
                else:
                    np.testing.assert_allclose(getattr(record, kind), whole[i], atol=step)
            if expected.sparse is not None:
                assert record.sparse.indices.tolist() == expected.sparse[i].indices.tolist()
                assert record.tokens == expected.tokens[i]


def test_stream_with_truncation_and_on_error(server, collect) -> None:
    texts = ["a", "search " * 9000, "b"]
    with pytest.raises(SmartEmbedderError, match="422 text_too_long"):
        collect(server.url, texts, truncate=False)
    found = collect(server.url, texts, truncate=False, on_error="yield")
    assert [record.dense is None for record in found] == [False, True, False]
    assert [record.error and record.error.code for record in found] == [None, "text_too_long", None]
    found = collect(server.url, texts)
    assert [[warning["code"] for warning in record.warnings] for record in found] == [
        [],
        ["input_truncated"],
        [],
    ]


def test_stream_raises_errors_of_the_service(server, collect) -> None:
    with pytest.raises(SmartEmbedderError, match="422 invalid_request"):
        collect(server.url, ["a"], dimensions=3)
    for given in (None, 7, ("a", 7), ("a", "b", "c")):
        with pytest.raises(SmartEmbedderError, match="item 1 of the stream is .*pairs of an id"):
            collect(server.url, ["a", given])
    assert collect(server.url, []) == []


@pytest.mark.parametrize("after", [[1], [5000, 200_000, 1, 40_000]])
def test_stream_keeps_order_and_ids_after_lost_connections(
    server, collect, after: list[int]
) -> None:
    pairs = [(f"doc-{i}", text) for i, text in enumerate(MANY)]
    with Relay(after) as relay:
        relay.connect_to(server.url)
        found = collect(relay.url, pairs)
    assert [(record.id, record.text) for record in found] == pairs


def test_stream_has_one_vector_space(server, other_server) -> None:
    with Relay() as relay, Client(relay.url) as client, Client(server.url) as direct:
        relay.connect_to(server.url)
        records = client.embed_stream(MANY * 3)
        assert next(records).vector_space == direct.embed(["river"]).vector_space
        relay.disconnect()
        relay.connect_to(other_server.url)
        with pytest.raises(SmartEmbedderError, match="here, wanted .* .412 vector_space_differs"):
            list(records)


def test_stream_reads_texts_as_needed(server) -> None:
    taken = 0

    def source() -> Iterator[str]:
        nonlocal taken
        for text in MANY * 20:
            taken += 1
            yield text

    with Client(server.url) as client:
        records = client.embed_stream(source())
        for _ in range(50):
            next(records)
        assert taken <= 50 + OPEN_PAGES * 1024
        records.close()
    server.wait_for_metric("embedding_active_requests", 0)


def embed_while_closing(url: str) -> None:
    """Embed with a client that is closed before its connection is opened."""
    http = httpx.Client(event_hooks={"request": [lambda _: http.close()]})
    with Client(url, http=http) as client:
        client.embed(["river"])


def test_connection_that_opens_while_the_client_closes_is_closed(server) -> None:
    embed_while_closing(server.url)
    gc.collect()  # A socket that is still open would be a ResourceWarning.


def test_synchronous_stream_ignores_a_running_event_loop(server) -> None:
    async def begin(client: Client) -> Iterator[StreamedText]:
        records = client.embed_stream(MANY)
        next(records)
        return records

    with Client(server.url) as client:
        assert len([*asyncio.run(begin(client))]) == len(MANY) - 1


def test_page_size_adapts_to_two_seconds_within_limits() -> None:
    pace = Pace(16_384, 4096, 524_288)
    pace.record(16_384, 3.0)
    assert pace.size == 10_922
    # A page of less than half the size tells nothing.
    pace.record(5_000, 0.1)
    assert pace.size == 10_922
    for seconds, size in ((0.0, 524_288), (100.0, 4096)):
        for _ in range(20):
            pace.record(pace.size, seconds)
        assert pace.size == size


async def test_pages_are_limited_in_bytes_and_texts() -> None:
    pace = Pace(1_000, 100, 524_288)
    for texts, limit in ((["x" * 100] * 25, 10), ([""] * 3_000, 1_024)):
        pages = [page async for page in read_pages(texts, pace)]
        assert [pair for page in pages for pair in page] == list(enumerate(texts))
        # A page may also end because a second has passed.
        assert len(texts) // limit <= len(pages)
        assert max(map(len, pages)) <= limit
