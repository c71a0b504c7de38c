"""The server that is checked, and what a check raises when it fails or does not apply."""

from enum import StrEnum
from http import HTTPStatus
from typing import Any

import httpx2

from smart_embedder.api.answers import EmbeddingResponse, ErrorResponse, RerankResponse
from tools.service import EMBED, RERANK, Service, describe, sums_of

_MAX_CHARACTERS = 200
# Two forwards of one text may differ so much in half precision.
TOLERANCE = 0.02
_NEEDS_RETRY_AFTER = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


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


class Target(Service):
    """The server that is checked; what the last checks judge is recorded."""

    def __init__(self, url: str, token: str | None, timeout: float) -> None:
        super().__init__(url, token, timeout)
        self.access = Access.OPEN
        self.without_id: list[str] = []
        self.refusals: list[str] = []
        self.without_retry_after: list[str] = []

    def identify(self) -> None:
        """Read /health as `Service` does, and whether a token is asked for."""
        super().identify()
        # Ask for nothing, with the token and without any.
        with_token, without = (
            self.post(EMBED, {"sentences": []}, token=token).status_code == HTTPStatus.UNAUTHORIZED
            for token in (None, "")
        )
        if with_token:
            self.access = Access.REFUSED if self.token else Access.CLOSED
        else:
            self.access = Access.GRANTED if without else Access.OPEN

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
        return sums_of(answer.text)

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

    def _record(self, answer: httpx2.Response) -> None:
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


def read_error(answer: httpx2.Response) -> ErrorResponse:
    """The body of an error, which must hold the answer's own request id."""
    body = ErrorResponse.model_validate_json(answer.content, strict=True)
    expect("its request_id", body.request_id, answer.headers.get("x-request-id"))
    return body
