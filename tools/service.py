"""A running service as the tools ask it: with its token, and later where it has no room now."""

import argparse
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2

EMBED = "/embeddings/"
RERANK = "/rerank"
# Tries of one request, because other clients may use up the rate limit meanwhile.
_TRIES = 5


class ServiceError(Exception):
    """There is no service, or it does not do what it is asked for; the text is one sentence."""


def add_server(parser: argparse._ActionsContainer) -> None:
    """Add the arguments that tell which server is asked, and how."""
    add, url = parser.add_argument, "http://localhost:8000"
    add("--url", default=url, type=address, help="the address of the server (%(default)s)")
    add("--token", help="the access token, if the server asks for one")
    help_ = "the most seconds for one answer (%(default)g)"
    add("--timeout", default=120.0, type=float, help=help_)


def address(text: str) -> str:
    """Argparse type: an http or https address, without its closing slash."""
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text.rstrip("/")


class Service:
    """Sends requests, with the token if there is one; threads may share it.

    A request that is refused with one of the statuses `later` is sent again as soon as the
    Retry-After of the refusal says, so many times, but never later than `timeout`.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout: float | None = None,
        later: Collection[int] = (HTTPStatus.TOO_MANY_REQUESTS,),
        tries: int = _TRIES,
    ) -> None:
        self.url = url
        self.token = token
        self.health: dict[str, Any] = {}
        self._timeout = timeout
        self._later = later
        self._tries = tries
        self._client = httpx2.Client(base_url=url, timeout=timeout)
        self.close = self._client.close

    def read_health(self) -> None:
        """Read /health, of which nothing is kept where it is not the one of this service."""
        try:
            health = self.get("/health").json()
        except ValueError:
            return
        if isinstance(health, dict) and {"status", "version", "model"} <= health.keys():
            self.health = health

    def require_ready(self) -> None:
        """Raise `ServiceError` where no healthy service answers; /health is read, too."""
        try:
            self.read_health()
        except httpx2.HTTPError as error:
            raise ServiceError(f"cannot reach {self.url}: {error}") from None
        if not self.health:
            raise ServiceError(f"what answers at {self.url} is no Smart Embedder: see its /health")
        if self.health["status"] != "healthy":
            reason = self.health.get("reason")
            raise ServiceError(f"the service at {self.url} is not ready: {reason}")

    def get(self, path: str, method: str = "GET") -> httpx2.Response:
        """Ask for a page."""
        return self._send(lambda: self._client.request(method, path, headers=self._headers()))

    def post(
        self,
        path: str,
        body: Any,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        """Send JSON, or bytes as they are; `token` stands in for the right one, "" for none."""
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        sent = httpx2.Headers(self._headers(token) | {"Content-Type": "application/json"})
        sent.update(headers or {})
        return self._send(lambda: self._client.post(path, headers=sent, **content))

    def work(self, path: str, body: Any, accept: str = "application/json") -> httpx2.Response:
        """The answer to a request that must be answered; raises `ServiceError`."""
        try:
            answer = self.post(path, body, headers={"Accept": accept})
        except httpx2.HTTPError as error:
            raise ServiceError(f"the service at {self.url} does not answer: {error!r}") from None
        if answer.status_code != HTTPStatus.OK:
            raise ServiceError(f"the service at {self.url} answered {describe(answer)}")
        return answer

    def _headers(self, token: str | None = None) -> dict[str, str]:
        token = self.token if token is None else token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _send(self, send: Callable[[], httpx2.Response]) -> httpx2.Response:
        tries = self._tries
        while True:
            answer = send()
            tries -= 1
            after = answer.headers.get("retry-after", "")
            if not tries or answer.status_code not in self._later or not after.isdecimal():
                return answer
            if self._timeout is not None and int(after) > self._timeout:
                return answer
            time.sleep(int(after))


def describe(answer: httpx2.Response) -> str:
    """Status and body, for the message of a failure."""
    return f"{answer.status_code} {answer.text}"
