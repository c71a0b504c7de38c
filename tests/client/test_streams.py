"""`embed_stream`: the vectors of `embed`, one text after the other, whatever happens on the way."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from smart_embedder_client import AsyncClient, Client, SmartEmbedderError, StreamedText
from smart_embedder_client.streams import OPEN_SECTIONS, SectionMaker

from tests.support.relay import Relay
from tests.support.texts import varied_texts

TEXTS = varied_texts(60)
MANY = [f"{text} {i}"[:200] for i, text in enumerate(TEXTS * 12)]
Collect = Callable[..., list[StreamedText]]


def with_threads(url: str, texts, **options: Any) -> list[StreamedText]:
    with Client(url) as client:
        return list(client.embed_stream(texts, **options))


def with_asyncio(url: str, texts, **options: Any) -> list[StreamedText]:
    async def source():
        for text in texts:
            yield text

    async def collect() -> list[StreamedText]:
        async with AsyncClient(url) as client:
            return [each async for each in client.embed_stream(source(), **options)]

    return asyncio.run(collect())


@pytest.fixture(params=[with_threads, with_asyncio], ids=["threads", "asyncio"])
def collect(request: pytest.FixtureRequest) -> Collect:
    return request.param


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"muvera": "document"},
        {"return_dense": False, "return_colbert": True, "return_tokens": True},
        {"output_dtype": "int8", "return_sparse": False, "return_colbert": True},
    ],
)
def test_the_vectors_are_those_of_embed(server, collect: Collect, options) -> None:
    found = collect(server.url, TEXTS, **options)
    with Client(server.url) as client:
        expected = client.embed(TEXTS, **options)
    assert [each.text for each in found] == TEXTS
    step = 1 if "output_dtype" in options else 1e-5
    for i, each in enumerate(found):
        assert each.id == i
        assert each.error is None
        for kind in ("dense", "colbert", "muvera"):
            whole = getattr(expected, kind)
            if whole is None:
                assert getattr(each, kind) is None
            else:
                np.testing.assert_allclose(getattr(each, kind), whole[i], atol=step)
        if expected.sparse is not None:
            assert each.sparse is not None
            np.testing.assert_array_equal(each.sparse.indices, expected.sparse[i].indices)
        if expected.tokens is not None:
            assert each.tokens == expected.tokens[i]


def test_many_texts_come_back_in_order_with_their_ids(server, collect: Collect) -> None:
    pairs = [(f"doc-{i}", text) for i, text in enumerate(MANY)]
    found = collect(server.url, pairs)
    assert [(each.id, each.text) for each in found] == pairs


def test_a_long_text_is_cut_with_a_warning_or_raised_or_yielded(server, collect: Collect) -> None:
    texts = ["a", "search " * 9000, "b"]
    with pytest.raises(SmartEmbedderError, match="422 text_too_long"):
        collect(server.url, texts, truncate=False)
    first, bad, last = collect(server.url, texts, truncate=False, on_error="yield")
    assert first.dense is not None
    assert last.dense is not None
    assert bad.dense is None
    assert bad.error is not None
    assert (bad.error.status, bad.error.code) == (422, "text_too_long")
    first, cut, _ = collect(server.url, texts)
    assert first.warnings == []
    assert cut.warnings[0]["code"] == "input_truncated"


def test_what_the_service_refuses_is_raised(server, collect: Collect) -> None:
    with pytest.raises(SmartEmbedderError, match="422 invalid_request"):
        collect(server.url, ["a"], dimensions=3)
    for given in (None, 7, ("a", 7), ("a", "b", "c")):
        with pytest.raises(SmartEmbedderError, match="item 1 of the stream is .*pairs of an id"):
            collect(server.url, ["a", given])
    assert collect(server.url, []) == []


@pytest.mark.parametrize("after", [[1], [300_000], [5000, 200_000, 1, 40_000]])
def test_a_lost_connection_is_made_good(server, collect: Collect, after: list[int]) -> None:
    """No text is missing, none is there twice."""
    with Relay(after) as relay:
        relay.connect_to(server.url)
        found = collect(relay.url, MANY)
    assert [each.text for each in found] == MANY


def test_a_stream_has_one_space_also_where_the_model_is_replaced_under_it(
    server, other_server
) -> None:
    with Relay() as relay, Client(relay.url) as client, Client(server.url) as direct:
        relay.connect_to(server.url)
        records = client.embed_stream(MANY * 3)
        assert next(records).vector_space == direct.embed(["river"]).vector_space
        relay.disconnect()
        relay.connect_to(other_server.url)
        with pytest.raises(SmartEmbedderError, match="weights: .* .412 vector_space_differs"):
            list(records)


def test_texts_are_taken_as_they_are_needed(server) -> None:
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
        assert taken <= 50 + OPEN_SECTIONS * 1024
        records.close()
    server.wait_for_metric("embedding_active_requests", 0)


def test_a_section_is_as_large_as_its_size_says_which_has_a_limit() -> None:
    maker = SectionMaker({})
    while not maker.full:
        maker.add("x" * 100)
    section = maker.take()
    assert section is not None
    assert maker.take() is None
    assert len(section.body.splitlines()) <= maker.pace.size // 100 + 1
    for _ in range(20):
        maker.record_end()
    assert maker.pace.size == 524_288
