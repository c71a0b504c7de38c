"""Errors: one exception, and retries only if they make sense."""

import asyncio
import pickle
import socket
import time
from pathlib import Path

import httpx
import pytest
from smart_embedder_client import AsyncClient, Client, SmartEmbedderError
from smart_embedder_client.calls import Retries
from smart_embedder_client.errors import refusal

from tests.client.conftest import sync_client
from tests.clients.conftest import TOKEN, full_queue
from tests.support.held import held
from tests.support.server import RunningServer

TEXT = ["search"]


class Traffic:
    """Records the requests and responses of a client; `on_refusal` is called before a retry."""

    def __init__(self, on_refusal=lambda: None) -> None:
        self.sent: list[float] = []
        self.refused: list[tuple[float, httpx.Response]] = []
        self._on_refusal = on_refusal
        self.hooks = {"request": [self._send], "response": [self._receive]}

    def _send(self, _request: httpx.Request) -> None:
        self.sent.append(time.monotonic())

    def _receive(self, response: httpx.Response) -> None:
        if response.status_code != 200:
            self.refused.append((time.monotonic(), response))
            self._on_refusal()

    def check_pauses(self, status: int) -> None:
        """Check that no retry came before its Retry-After."""
        assert self.refused
        for at, response in self.refused:
            assert response.status_code == status
            following = min(sent for sent in self.sent if sent > at)
            assert following - at >= float(response.headers["retry-after"])


def test_503_is_retried_after_its_retry_after(
    connect, busy_server: RunningServer, hold: Path
) -> None:
    traffic = Traffic(on_refusal=lambda: hold.unlink(missing_ok=True))
    with (
        connect(busy_server.url, token=TOKEN, hooks=traffic.hooks) as client,
        full_queue(busy_server, hold),
    ):
        assert client.embed(TEXT, return_colbert=False).dense.shape[0] == 1
    traffic.check_pauses(503)


def test_503_is_raised_beyond_max_retries(busy_server: RunningServer, hold: Path) -> None:
    traffic = Traffic()
    options = {"token": TOKEN, "max_retries": 0, "hooks": traffic.hooks}
    with (
        sync_client(busy_server.url, **options) as client,
        full_queue(busy_server, hold),
        pytest.raises(SmartEmbedderError) as caught,
    ):
        client.embed(TEXT)
    error = caught.value
    (_, response) = traffic.refused[0]
    assert (error.status, error.code, len(traffic.sent)) == (503, "queue_full", 1)
    assert "queue" in error.detail
    assert error.request_id == response.headers["x-request-id"]
    assert error.retry_after == float(response.headers["retry-after"])
    assert str(error) == f"{error.detail} (503 queue_full, request {error.request_id})"
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_permanent_errors_are_not_retried(busy_server, server) -> None:
    def embed(client, **options):
        return client.embed(TEXT, priority=7, **options)

    for url, token, ask, message in (
        (busy_server.url, "another", embed, "401 unauthorized"),
        (server.url, None, lambda client: embed(client, dimensions=3), "422 invalid_request"),
        (server.url, None, lambda client: client.rerank("search", []), "400 empty_input"),
        (f"{server.url}/nowhere", None, embed, "404 "),
    ):
        traffic = Traffic()
        with sync_client(url, token=token, hooks=traffic.hooks) as client:
            with pytest.raises(SmartEmbedderError, match=message) as caught:
                ask(client)
            assert (len(traffic.sent), caught.value.retry_after) == (1, None)
    with Client(busy_server.url, token="another") as client:
        assert client.health().ready


def test_unreachable_server_is_retried_a_limited_number_of_times(
    connect, server, closed_port
) -> None:
    traffic, port = Traffic(), int(server.url.rpartition(":")[2])

    def lead(request: httpx.Request) -> None:
        if len(traffic.sent) == 5:
            request.url = request.url.copy_with(port=port)

    traffic.hooks["request"].append(lead)
    with connect(closed_port, max_retries=1, hooks=traffic.hooks) as client:
        for ask, sent in ((lambda: client.embed(TEXT), 2), (client.health, 3)):
            with pytest.raises(
                SmartEmbedderError, match=f"no connection to {closed_port}"
            ) as caught:
                ask()
            assert len(traffic.sent) == sent
        # The server is back after the first of these tries.
        assert client.embed(TEXT).dense is not None
    assert len(traffic.sent) == 5
    assert (caught.value.status, caught.value.code) == (None, "unreachable")
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_client_timeout_is_not_retried(connect) -> None:
    traffic = Traffic()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        connect(
            f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.5, hooks=traffic.hooks
        ) as client,
        pytest.raises(SmartEmbedderError, match="client_timeout"),
    ):
        client.embed(TEXT)
    assert len(traffic.sent) == 1


async def test_cancelled_task_removes_its_request_from_the_queue(
    busy_server: RunningServer, hold: Path
) -> None:
    left = busy_server.metric("embedder_abandoned_requests_total")
    wait = busy_server.wait_for_metric
    async with AsyncClient(busy_server.url, token=TOKEN) as client:
        expected = await client.embed(TEXT, return_colbert=False)
        await asyncio.to_thread(wait, "embedding_active_requests", 0)
        with held(hold):
            task = asyncio.create_task(client.embed(TEXT))
            await asyncio.to_thread(wait, "embedding_active_requests", 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait, "embedder_abandoned_requests_total", left + 1)
        following = await client.embed(TEXT, return_colbert=False)
    assert following.dense.tobytes() == expected.dense.tobytes()


def busy(seconds: float | None, status: int = 503) -> SmartEmbedderError:
    return SmartEmbedderError("busy", "queue_full", status, None, seconds)


def test_retry_pauses_respect_retry_after_and_max_wait() -> None:
    retries = Retries(max_retries=100, max_wait=10)
    pauses = [retries.pause_after(busy(3.0, status)) for status in (503, 429)]
    assert all(3.0 <= pause <= 3.75 for pause in pauses)
    with pytest.raises(SmartEmbedderError):
        retries.pause_after(busy(10 - sum(pauses) + 0.1))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7),
        ("-7", 0),
        ("nan", None),
        ("Mon, 30 Nov 2026 07:00:00 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds(header: str, seconds: float | None) -> None:
    request = httpx.Request("POST", "http://127.0.0.1/embeddings/")
    answer = httpx.Response(503, headers={"Retry-After": header}, request=request)
    assert refusal(answer).retry_after == seconds


LOST = SmartEmbedderError("lost", "connection_lost")


@pytest.mark.parametrize("error", [busy(None), busy(1.0, 504), busy(1.0, 422), busy(61.0), LOST])
def test_other_errors_are_not_retried(error: SmartEmbedderError) -> None:
    with pytest.raises(SmartEmbedderError) as caught:
        Retries(max_retries=5, max_wait=60).pause_after(error)
    assert caught.value is error
    # Only a page of a stream is sent again.
    assert Retries(5, 60, resumes=True).pause_after(LOST) > 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "is no address such as http://127.0.0.1:8000"),
        ("unix:///run/embedder", "is no address"),
        ("http://127.0.0.1:8000/openai/v1/", "/v1, which OpenAI's clients need"),
        ("http://127.0.0.1:800000", "is no address"),
        ("http://127.0.0.1:8000/?a=b", "is no address"),
        (8000, "is no address"),
    ],
)
def test_invalid_address_raises_at_once(url, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Client(url)


def test_invalid_token_is_not_in_the_error() -> None:
    for token in ("secret\n", "s\u00e9cret", "\x00"):
        with pytest.raises(ValueError, match="no header can have") as caught:
            Client(token=token)
        assert token not in str(caught.value)


def test_address_and_token_are_read_from_the_environment(
    busy_server: RunningServer, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMART_EMBEDDER_URL", busy_server.url)
    monkeypatch.setenv("SMART_EMBEDDER_TOKEN", TOKEN)
    with Client() as client:
        assert client.embed(TEXT).dense.shape[0] == 1
    sent: list[httpx.Request] = []
    with (
        httpx.Client(event_hooks={"request": [sent.append]}) as http,
        Client(server.url, http=http) as client,
    ):
        client.embed(TEXT)
    # The token is not sent to another service.
    assert "authorization" not in sent[0].headers


def test_invalid_input_is_an_error_of_the_client() -> None:
    with Client() as client:
        for ask, message in (
            (lambda: client.embed(["a", "river \ud800"]), "half of a surrogate pair.*river "),
            (lambda: client.embed(["a", None]), "index 1 is NoneType and no string"),
            (lambda: client.rerank("a", [7]), "index 0 is int and no string"),
            (lambda: client.rerank("\udfff", ["a"]), "invalid_input"),
            (lambda: client.embed(["a"], dimensions=float("nan")), "invalid_input"),
            (lambda: client.embed("search"), "put it into a list"),
        ):
            with pytest.raises((SmartEmbedderError, TypeError), match=message):
                ask()


def test_closed_client_raises_client_closed(server) -> None:
    with Client(server.url) as client:
        stream = client.embed_stream(f"river {i}" for i in range(5000))
        next(stream)
    for ask in (lambda: client.embed(TEXT), client.health, lambda: list(stream)):
        with pytest.raises(SmartEmbedderError, match=r"client_closed|connection_lost"):
            ask()

    async def with_asyncio() -> None:
        async with AsyncClient(server.url) as client:
            pass
        await client.embed(TEXT)

    with pytest.raises(SmartEmbedderError, match="client_closed"):
        asyncio.run(with_asyncio())
