"""413 before a body is read whole."""

import pytest

from app.errors import BodyTooLargeError
from app.middleware.limits import LimitBody
from tests.app.middleware.exchange import Inner, exchange


@pytest.mark.parametrize(
    ("parts", "announced", "outcome"),
    [
        pytest.param([b"a"], b"100", 200, id="announced"),
        pytest.param([b"a"], b"x", 200, id="announced badly"),
        pytest.param([b"a"], b"101", 413, id="announced too large"),
        pytest.param([b"a" * 60, b"a" * 40], None, 200, id="sent"),
        pytest.param([b"a" * 60, b"a" * 41, b"no"], None, None, id="sent too large"),
    ],
)
async def test_a_body_too_large_is_refused_before_it_is_read_or_at_the_byte_too_many(
    parts, announced, outcome
) -> None:
    inner = Inner()
    headers = [] if announced is None else [(b"content-length", announced)]
    request = exchange(LimitBody(inner, 100), *parts, headers=headers)
    if outcome is None:
        with pytest.raises(BodyTooLargeError):
            await request
        return
    _, sent = await request
    assert sent[0]["status"] == outcome
    assert inner.body == (b"".join(parts) if outcome == 200 else None)
    if outcome == 413:
        assert b"larger than 100 bytes (MAX_BODY_BYTES)" in sent[1]["body"]
