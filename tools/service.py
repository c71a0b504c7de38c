"""A client of a running service for the tools: it sends the token, and retries when told to."""

import argparse
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2

EMBED = "/embeddings/"
RERANK = "/rerank"
# Attempts for one request, because other clients may use up the rate limit meanwhile.
_ATTEMPTS = 5


class ServiceError(Exception):
    """The service cannot be reached or refuses a request; the message is one sentence."""


def add_server(parser: argparse._ActionsContainer) -> None:
    """Add the arguments that name the server."""
    add, url = parser.add_argument, "http://localhost:8000"
    add("--url", default=url, type=parse_url, help="the address of the server (%(default)s)")
    add("--token", help="the access token, if the server requires one")
    help_ = "seconds until a request has failed (%(default)g)"
    add("--timeout", default=120.0, type=float, help=help_)


def parse_url(text: str) -> str:
    """Parse an http or https address for argparse; remove a slash at its end."""
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text.rstrip("/")


class Service:
    """Sends requests with the token, if there is one; thread-safe.

    A request that gets one of the statuses `retry_on` is sent again after the Retry-After of the
    response, up to `attempts` times, unless Retry-After is longer than `timeout`.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout: float | None = None,
        retry_on: Collection[int] = (HTTPStatus.TOO_MANY_REQUESTS,),
        attempts: int = _ATTEMPTS,
    ) -> None:
        self.url = url
        self.token = token
        self.health: dict[str, Any] = {}
        self._timeout = timeout
        self._retry_on = retry_on
        self._attempts = attempts
        self._client = httpx2.Client(base_url=url, timeout=timeout)
        self.close = self._client.close

    def read_health(self) -> None:
        """Read /health; keep it only if it is a Smart Embedder's."""
        try:
            health = self.get("/health").json()
        except ValueError:
            return
        if isinstance(health, dict) and {"status", "version", "model"} <= health.keys():
            self.health = health

    def require_ready(self) -> None:
        """Read /health; raise `ServiceError` unless a healthy service answers."""
        try:
            self.read_health()
        except httpx2.HTTPError as error:
            raise ServiceError(f"cannot reach {self.url}: {error}") from None
        if not self.health:
            raise ServiceError(f"the server at {self.url} is no Smart Embedder: see its /health")
        if self.health["status"] != "healthy":
            reason = self.health.get("reason")
            raise ServiceError(f"the service at {self.url} is not ready: {reason}")

    def get(self, path: str, method: str = "GET") -> httpx2.Response:
        """Send a request without a body."""
        return self._send(lambda: self._client.request(method, path, headers=self._headers()))

    def post(
        self,
        path: str,
        body: Any,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        """Send JSON, or bytes as they are; `token` replaces the service's own, "" sends none."""
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        all_headers = httpx2.Headers(self._headers(token) | {"Content-Type": "application/json"})
        all_headers.update(headers or {})
        return self._send(lambda: self._client.post(path, headers=all_headers, **content))

    def work(self, path: str, body: Any, accept: str = "application/json") -> httpx2.Response:
        """Send a request and return the response; raise `ServiceError` unless it is 200."""
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
        attempts = self._attempts
        while True:
            answer = send()
            attempts -= 1
            after = answer.headers.get("retry-after", "")
            if not attempts or answer.status_code not in self._retry_on or not after.isdecimal():
                return answer
            if self._timeout is not None and int(after) > self._timeout:
                return answer
            time.sleep(int(after))


def describe(answer: httpx2.Response) -> str:
    """Describe a response by status and body, for an error message."""
    return f"{answer.status_code} {answer.text}"
