"""Bodies of answers, read no further than an honest answer can go."""

from collections.abc import AsyncIterator, Iterator

import httpx

from smart_embedder_client.errors import unexpected_answer
from smart_embedder_client.limits import SMALL, Limits


def check_encoding(response: httpx.Response) -> None:
    """Raise the error of a compressed answer, which nobody asked for and which hides its size."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise unexpected_answer(response, f"the answer is compressed ({encoding})")


def chunks_of(response: httpx.Response) -> Iterator[bytes]:
    """The body as it arrives; all of it if a hook of the caller's has read it already."""
    return iter([response.content]) if response.is_stream_consumed else response.iter_raw()


async def chunks_of_async(response: httpx.Response) -> AsyncIterator[bytes]:
    """The same for asyncio."""
    if response.is_stream_consumed:
        yield response.content
        return
    async for chunk in response.aiter_raw():
        yield chunk


def read_body(response: httpx.Response, limits: Limits) -> httpx.Response:
    """The same response with its body; raises `SmartEmbedderError` if it is too long."""
    body = _Body(response, limits)
    for chunk in chunks_of(response):
        body.add(chunk)
    return body.whole()


async def read_body_async(response: httpx.Response, limits: Limits) -> httpx.Response:
    """The same for asyncio."""
    body = _Body(response, limits)
    async for chunk in chunks_of_async(response):
        body.add(chunk)
    return body.whole()


class _Body:
    def __init__(self, response: httpx.Response, limits: Limits) -> None:
        check_encoding(response)
        self._response = response
        # A refusal is no larger, whatever was asked for.
        self._most = (limits if response.status_code == httpx.codes.OK else SMALL).bytes
        self._left = self._most
        self._chunks: list[bytes] = []

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._left -= len(chunk)
        if self._left < 0:
            what = f"the answer has more than the {self._most} bytes that it may have"
            raise unexpected_answer(self._response, what)

    def whole(self) -> httpx.Response:
        of = self._response
        content = b"".join(self._chunks)
        return httpx.Response(
            of.status_code, headers=of.headers, content=content, request=of.request
        )
