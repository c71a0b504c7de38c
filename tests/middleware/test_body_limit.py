"""413 before a body is read whole."""

import pytest

from smart_embedder.errors import BodyTooLargeError
from smart_embedder.middleware.body import LimitBody
from tests.middleware.exchange import Inner, exchange, header


@pytest.mark.parametrize(("announced", "status"), [(b"100", 200), (b"101", 413), (b"x", 200)])
async def test_an_announced_length_is_refused_before_anything_is_read(announced, status) -> None:
    inner = Inner()
    _, sent = await exchange(LimitBody(inner, 100), b"a", headers=[(b"content-length", announced)])
    assert sent[0]["status"] == status
    assert inner.called == (status == 200)
    if status == 413:
        assert b"larger than 100 bytes (MAX_BODY_BYTES)" in sent[1]["body"]


async def test_a_body_without_a_length_is_refused_at_the_byte_too_many() -> None:
    inner = Inner()
    await exchange(LimitBody(inner, 100), b"a" * 60, b"a" * 40)
    assert inner.body == b"a" * 100
    with pytest.raises(BodyTooLargeError):
        await exchange(LimitBody(Inner(), 100), b"a" * 60, b"a" * 41, b"never read")


async def test_a_stream_has_no_limit() -> None:
    inner = Inner()
    _, sent = await exchange(
        LimitBody(inner, 100),
        b"a" * 200,
        path="/embeddings/stream",
        headers=[(b"content-length", b"200")],
    )
    assert (sent[0]["status"], inner.body) == (200, b"a" * 200)
    assert header(sent, b"x-request-id")
