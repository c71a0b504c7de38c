"""The server that is checked, and what a check raises when it fails or does not apply."""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from smart_embedder.api.answers import EmbeddingResponse, ErrorResponse, RerankResponse

_MAX_CHARACTERS = 200
# Two forwards of one text may differ so much in half precision.
TOLERANCE = 0.02
EMBED = "/embeddings/"
RERANK = "/rerank"
NO_RERANKER = "none"
_NEEDS_RETRY_AFTER = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
# Tries of one request, because other clients may use up the rate limit meanwhile.
_MAX_TRIES = 5


class CheckFailedError(AssertionError):
    """A check failed; the text says what was expected and what was seen."""

    def __init__(self, what: str, expected: object, seen: object) -> None:
        super().__init__(f"{what}: expected {expected}, saw {_shorten(seen)}")


class Skip(Exception):  # noqa: N818 - no error
    """A check does not apply here; the text says why."""


def expect(what: str, seen: object, expected: object) -> None:
    """Raise `CheckFailedError` unless both are equal."""
    expect_that(what, seen == expected, _shorten(expected), seen)


def expect_that(what: str, holds: object, expected: object, seen: object) -> None:
    """Raise `CheckFailedError` unless the condition `holds`."""
    if not holds:
        raise CheckFailedError(what, expected, seen)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."


class Access(StrEnum):
    """Whether the service asks for a token, and whether it takes the one that was given."""

    OPEN = "it asks for no token"
    GRANTED = "it asks for a token and takes this one"
    REFUSED = "it asks for a token and refuses this one"
    CLOSED = "it asks for a token and none was given: it needs --token"


class NotOursError(Exception):
    """Whatever answers at the address is no Smart Embedder, or nothing answers there."""


def add_server(parser: argparse._ActionsContainer) -> None:
    """Add the arguments that tell which server is asked, and how."""
    add, url = parser.add_argument, "http://localhost:8000"
    add("--url", default=url, type=_address, help="the address of the server (%(default)s)")
    add("--token", help="the access token, if the server asks for one")
    help_ = "the most seconds for one answer (%(default)g)"
    add("--timeout", default=120.0, type=float, help=help_)


def _address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text.rstrip("/")


class Target:
    """Sends requests, with the token if there is one, and records what the last checks judge."""

    def __init__(self, url: str, token: str | None, timeout: float) -> None:
        self.url = url
        self.token = token
        self._timeout = timeout
        self._client = httpx2.Client(base_url=url, timeout=timeout)
        self.close = self._client.close
        self.health: dict[str, Any] = {}
        self.access = Access.OPEN
        self.waited = 0
        self.without_id: list[str] = []
        self.refusals: list[str] = []
        self.without_retry_after: list[str] = []

    def identify(self) -> None:
        """Read /health; raise `NotOursError` where it is not the one of this service."""
        try:
            self.read_health()
        except httpx2.HTTPError as error:
            raise NotOursError(f"cannot reach {self.url}: {error}") from None
        if not self.health:
            raise NotOursError(f"what answers at {self.url} is no Smart Embedder: see its /health")
        # Ask for nothing, with the token and without any.
        with_token, without = (
            self.post(EMBED, {"sentences": []}, token=token).status_code == HTTPStatus.UNAUTHORIZED
            for token in (None, "")
        )
        if with_token:
            self.access = Access.REFUSED if self.token else Access.CLOSED
        else:
            self.access = Access.GRANTED if without else Access.OPEN

    def read_health(self) -> None:
        """Read /health, of which nothing is kept where it is not the one of this service."""
        try:
            health = self.get("/health").json()
        except ValueError:
            return
        if isinstance(health, dict) and {"status", "version", "model"} <= health.keys():
            self.health = health

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

    def embed(self, sentences: list[str], **options: bool) -> EmbeddingResponse:
        """The answer to texts that must be embedded; raises `Skip` while they cannot be."""
        answer = self._work(EMBED, {"sentences": sentences, **options}, HTTPStatus.OK)
        return EmbeddingResponse.model_validate_json(answer.content, strict=True)

    def rerank(self, **body: Any) -> RerankResponse:
        """The answer to passages that must be ranked; raises `Skip` while they cannot be."""
        answer = self._work(RERANK, body, HTTPStatus.OK)
        return RerankResponse.model_validate_json(answer.content, strict=True)

    def refused(self, path: str, body: Any, status: int) -> ErrorResponse:
        """The body of a request that must be refused; raises `Skip` while it cannot be."""
        return read_error(self._work(path, body, status))

    def _work(self, path: str, body: Any, status: int) -> httpx2.Response:
        self.require_healthy()
        answer = self.post(path, body)
        self.require_access(answer)
        expect_that(f"POST {path}", answer.status_code == status, status, describe(answer))
        return answer

    def metrics(self) -> dict[str, float]:
        """The sum of every series of /metrics by its name."""
        answer = self.get("/metrics")
        self.require_access(answer)
        expect("GET /metrics", answer.status_code, 200)
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name] += sample.value
        return found

    @property
    def healthy(self) -> bool:
        """Whether /health said so at the start."""
        return bool(self.health["status"] == "healthy")

    def require_healthy(self) -> None:
        """Raise `Skip` where the service does no work now."""
        if not self.healthy:
            raise Skip(f"the service is {self.health['status']}")

    def require_access(self, answer: httpx2.Response) -> None:
        """Raise `Skip` where it is 401 because no valid token was given."""
        closed = self.access in {Access.REFUSED, Access.CLOSED}
        if closed and answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise Skip(self.access)

    def require_reranker(self) -> None:
        """Raise `Skip` where the service does not rerank."""
        if self.health["reranker_model"] == NO_RERANKER:
            raise Skip("RERANKER_MODEL is none")

    def _headers(self, token: str | None = None) -> dict[str, str]:
        token = self.token if token is None else token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _send(self, send: Callable[[], httpx2.Response]) -> httpx2.Response:
        """Send a request, and again where the rate limit refuses it, after its Retry-After."""
        for _ in range(_MAX_TRIES):
            answer = self._record(send())
            after = answer.headers.get("retry-after", "")
            limited = answer.status_code == HTTPStatus.TOO_MANY_REQUESTS and after.isdecimal()
            if not limited or int(after) > self._timeout:
                break
            self.waited += int(after)
            time.sleep(int(after))
        return answer

    def _record(self, answer: httpx2.Response) -> httpx2.Response:
        """Record whether it has what every answer must have."""
        name = f"{answer.request.method} {answer.request.url.path} {answer.status_code}"
        if not answer.headers.get("x-request-id"):
            self.without_id.append(name)
        disabled = "reranker_disabled" in answer.text  # No wait changes that.
        if answer.status_code in _NEEDS_RETRY_AFTER and "/health" not in name and not disabled:
            self.refusals.append(name)
            after = answer.headers.get("retry-after", "")
            if not after.isdecimal() or int(after) < 1:
                self.without_retry_after.append(name)
        return answer


def read_error(answer: httpx2.Response) -> ErrorResponse:
    """The body of an error, which must hold the answer's own request id."""
    body = ErrorResponse.model_validate_json(answer.content, strict=True)
    expect("its request_id", body.request_id, answer.headers.get("x-request-id"))
    return body


def describe(answer: httpx2.Response) -> str:
    """Status and body, for the message of a failure."""
    return f"{answer.status_code} {answer.text}"
