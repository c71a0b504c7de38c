"""The one exception, for refusals of the service and for requests that were not answered."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from smart_embedder_client.limits import SMALL, load_json

# The exceptions of reading an answer of another shape.
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
# Codes beside the service's own.
UNREACHABLE = "unreachable"
CLIENT_TIMEOUT = "client_timeout"
CONNECTION_LOST = "connection_lost"
UNEXPECTED_ANSWER = "unexpected_answer"
INVALID_INPUT = "invalid_input"
CLIENT_CLOSED = "client_closed"
VECTOR_SPACE_UNKNOWN = "vector_space_unknown"
# One of the service's own.
VECTOR_SPACE_DIFFERS = "vector_space_differs"


class SmartEmbedderError(Exception):
    """A request was refused, or not answered.

    Attributes:
        detail: A sentence that says why.
        code: A stable word: one of the service's, or `unreachable` (nothing was sent),
            `client_timeout`, `connection_lost`, `unexpected_answer` (not one to this request),
            `invalid_input` (it cannot be sent), `client_closed`, or `vector_space_unknown` (the
            service does not say whether its vectors are in the space that was asked for).
        status: The HTTP status; None where there was no answer.
        request_id: Finds the request in the service's log.
        retry_after: Seconds after which another try makes sense; None where it makes none.
    """

    def __init__(
        self,
        detail: str,
        code: str,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        # All of them, so that the exception can be pickled.
        super().__init__(detail, code, status, request_id, retry_after)
        self.detail = detail
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        """The sentence, and in parentheses what finds it in the documentation and in the log."""
        facts = [self.code if self.status is None else f"{self.status} {self.code}"]
        if self.request_id is not None:
            facts.append(f"request {self.request_id}")
        return f"{self.detail} ({', '.join(facts)})"


def check_status(response: httpx.Response) -> None:
    """Raise the error of an answer whose status is not 200."""
    if response.status_code != httpx.codes.OK:
        raise refusal(response)


def refusal(response: httpx.Response) -> SmartEmbedderError:
    """The error in an answer whose status is not 200."""
    told = json_object(response)
    # /tokenize answers errors as text-embeddings-inference does, by the second names.
    detail = told.get("detail", told.get("error"))
    code = told.get("code", told.get("error_type"))
    if isinstance(detail, str) and isinstance(code, str):
        return _error(response, detail, code)
    return unexpected_answer(response, f"the answer is HTTP {response.status_code}")


def unexpected_answer(response: httpx.Response, what: str) -> SmartEmbedderError:
    """The error for an answer that this service does not give."""
    detail = f"{what}, which is not an answer of Smart Embedder: look at what {response.url} is"
    return _error(response, detail, UNEXPECTED_ANSWER)


def _error(response: httpx.Response, detail: str, code: str) -> SmartEmbedderError:
    request_id = response.headers.get("x-request-id")
    retry_after = _seconds(response.headers.get("retry-after"))
    return SmartEmbedderError(detail, code, response.status_code, request_id, retry_after)


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; empty if there is none."""
    try:
        told = load_json(response.content, SMALL)
    except MALFORMED:
        return {}
    return told if isinstance(told, dict) else {}


@contextmanager
def transport_errors(http: httpx.Client | httpx.AsyncClient, url: str) -> Iterator[None]:
    """Raise the failures of a connection as `SmartEmbedderError`, and those of a closed client."""
    if http.is_closed:
        raise SmartEmbedderError("the client is closed: make another one", CLIENT_CLOSED)
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        detail = f"no connection to {url}: {error or 'timed out'}"
        raise SmartEmbedderError(detail, UNREACHABLE) from error
    except httpx.TimeoutException as error:
        detail = f"{url} did not answer within the client's timeout"
        raise SmartEmbedderError(detail, CLIENT_TIMEOUT) from error
    except httpx.RequestError as error:
        detail = f"the connection to {url} failed during the request: {error}"
        raise SmartEmbedderError(detail, CONNECTION_LOST) from error


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header in seconds: a number, or as proxies send it, a date."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        return _seconds_until(retry_after)
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _seconds_until(date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return max((moment - datetime.now(UTC)).total_seconds(), 0.0)
    except MALFORMED:
        return None
