"""The client's exception, for errors of the service and for requests without a response."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

# Raised when a response of an unexpected shape is parsed.
MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
# Codes of the client.
UNREACHABLE = "unreachable"
CLIENT_TIMEOUT = "client_timeout"
CONNECTION_LOST = "connection_lost"
UNEXPECTED_ANSWER = "unexpected_answer"
INVALID_INPUT = "invalid_input"
CLIENT_CLOSED = "client_closed"
# A code of the service.
VECTOR_SPACE_DIFFERS = "vector_space_differs"


class SmartEmbedderError(Exception):
    """A request was refused, or not answered.

    Attributes:
        detail: A sentence that gives the reason.
        code: A stable word: a code of the service, or `unreachable` (nothing was sent),
            `client_timeout`, `connection_lost`, `unexpected_answer` (the response does not fit the
            request), `invalid_input` (the request cannot be sent) or `client_closed`.
        status: The HTTP status; None if there was no response.
        request_id: The id of the request in the service's log.
        retry_after: Seconds after which to try again; None if the service names none.
    """

    def __init__(
        self,
        detail: str,
        code: str,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        # Pickling passes the arguments of `super().__init__` to this method.
        super().__init__(detail, code, status, request_id, retry_after)
        self.detail = detail
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        """Return the sentence, with status, code and request id in parentheses."""
        identifiers = [self.code if self.status is None else f"{self.status} {self.code}"]
        if self.request_id is not None:
            identifiers.append(f"request {self.request_id}")
        return f"{self.detail} ({', '.join(identifiers)})"


def check_status(response: httpx.Response) -> None:
    """Raise the error of a response whose status is not 200."""
    if response.status_code != httpx.codes.OK:
        raise refusal(response)


def refusal(response: httpx.Response) -> SmartEmbedderError:
    """Return the error of a response whose status is not 200."""
    body = json_object(response)
    # /tokenize uses the field names of text-embeddings-inference: error and error_type.
    detail = body.get("detail", body.get("error"))
    code = body.get("code", body.get("error_type"))
    if isinstance(detail, str) and isinstance(code, str):
        return _error(response, detail, code)
    return unexpected_answer(response, f"the answer is HTTP {response.status_code}")


def unexpected_answer(response: httpx.Response, problem: str) -> SmartEmbedderError:
    """Return the error for a response that Smart Embedder does not give."""
    detail = f"{problem}, which is not an answer of Smart Embedder: check what {response.url} is"
    return _error(response, detail, UNEXPECTED_ANSWER)


def _error(response: httpx.Response, detail: str, code: str) -> SmartEmbedderError:
    request_id = response.headers.get("x-request-id")
    retry_after = _parse_retry_after(response.headers.get("retry-after"))
    return SmartEmbedderError(detail, code, response.status_code, request_id, retry_after)


def json_object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response; an empty one if it has none."""
    try:
        body = response.json()
    except MALFORMED:
        return {}
    return body if isinstance(body, dict) else {}


@contextmanager
def transport_errors(http: httpx.Client | httpx.AsyncClient, url: str) -> Iterator[None]:
    """Raise a failed connection, or a closed client, as `SmartEmbedderError`."""
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


def _parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None if there is none, or a date."""
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
