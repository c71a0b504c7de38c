"""Bodies and answers in work are counted together, and let go of when their request ends."""

import pytest

from app.errors import QueueFullError
from app.middleware.memory_limit import LimitMemory

SCOPE = {"type": "http"}


async def send(_message) -> None:
    """A client that takes everything."""


def receiving(*chunks: bytes):
    left = list(chunks)

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


async def read_whole(_scope, receive, _send) -> None:
    while (await receive())["more_body"]:
        pass


async def test_a_body_is_refused_while_others_fill_the_memory() -> None:
    async def read_while_another_comes(scope, receive, send) -> None:
        await read_whole(scope, receive, send)
        limit.app = read_whole
        with pytest.raises(QueueFullError) as refused:
            await limit(SCOPE, receiving(b"x"), send)
        assert refused.value.retry_after == 1
        await limit(SCOPE, receiving(b""), send)

    limit = LimitMemory(read_while_another_comes, max_bytes=10)
    await limit(SCOPE, receiving(b"12345", b"67890"), send)
    await limit(SCOPE, receiving(b"x"), send)


async def test_an_answer_counts_until_it_is_handed_over() -> None:
    async def answer(_scope, _receive, send) -> None:
        head = [(b"content-length", b"10")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        limit.app = read_whole
        with pytest.raises(QueueFullError):
            await limit(SCOPE, receiving(b"x"), send)

    limit = LimitMemory(answer, max_bytes=10)
    await limit(SCOPE, receiving(b""), send)
    await limit(SCOPE, receiving(b"x"), send)


async def test_a_request_that_fails_lets_go_too() -> None:
    async def fail(scope, receive, send) -> None:
        await read_whole(scope, receive, send)
        limit.app = read_whole
        raise RuntimeError

    limit = LimitMemory(fail, max_bytes=10)
    with pytest.raises(RuntimeError):
        await limit(SCOPE, receiving(b"1234567890"), send)
    await limit(SCOPE, receiving(b"x"), send)
