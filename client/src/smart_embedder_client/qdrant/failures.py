"""What the failures of Qdrant's Python client mean."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from smart_embedder_client.qdrant.errors import (
    QdrantBusyError,
    QdrantError,
    QdrantFullError,
    QdrantRefusedError,
)

_REFUSED = {400, 413, 422}
_BUSY = {408, 429, 500, 502, 503, 504}
_INSUFFICIENT_STORAGE = 507
_NO_SPACE = ("no space", "disk is full", "out of disk", "insufficient storage")
_LONGEST_REASON = 300

_Code = grpc.StatusCode
_GRPC_REFUSED = {_Code.INVALID_ARGUMENT, _Code.FAILED_PRECONDITION, _Code.OUT_OF_RANGE}
_GRPC_BUSY = {
    _Code.UNAVAILABLE,
    _Code.DEADLINE_EXCEEDED,
    _Code.RESOURCE_EXHAUSTED,
    _Code.INTERNAL,
    _Code.UNKNOWN,
    _Code.ABORTED,
}


@contextmanager
def qdrant_failures(address: str) -> Iterator[None]:
    """Raise what Qdrant's client raises as `QdrantError`."""
    try:
        yield
    except UnexpectedResponse as error:
        raise _of_status(address, error.status_code or 0, _reason(error)) from error
    except ResourceExhaustedResponse as error:
        detail = f"Qdrant at {address} has no room for more requests: {error}"
        raise QdrantBusyError(detail, error.retry_after_s) from error
    except ResponseHandlingException as error:
        raise _of_transport(address, error.source) from error
    except grpc.RpcError as error:
        raise _of_grpc(address, error.code(), str(error.details())) from error
    except ValueError as error:  # Of the local engine.
        raise QdrantRefusedError(f"Qdrant at {address} refuses it: {error}") from error


def _of_status(address: str, status: int, reason: str) -> QdrantError:
    told = f"Qdrant at {address} answers {status}: {reason}"
    if status == _INSUFFICIENT_STORAGE or says_full(reason):
        return QdrantFullError(told)
    if status in _REFUSED:
        return QdrantRefusedError(told)
    return QdrantBusyError(told) if status in _BUSY else QdrantError(told)


def _of_grpc(address: str, code: grpc.StatusCode, reason: str) -> QdrantError:
    told = f"Qdrant at {address} answers {code.name}: {reason[:_LONGEST_REASON]}"
    if says_full(reason):
        return QdrantFullError(told)
    if code in _GRPC_REFUSED or "message larger" in reason:
        return QdrantRefusedError(told)
    return QdrantBusyError(told) if code in _GRPC_BUSY else QdrantError(told)


def _of_transport(address: str, source: Exception) -> QdrantError:
    if isinstance(source, httpx.TimeoutException):
        return QdrantBusyError(f"Qdrant at {address} did not answer in time")
    if isinstance(source, httpx.TransportError):
        return QdrantBusyError(f"no connection to Qdrant at {address}: {source}")
    return QdrantError(f"what answers at {address} is not Qdrant: {source}")


def says_full(reason: str) -> bool:
    """Whether a reason is that there is no space left."""
    return any(each in reason.lower() for each in _NO_SPACE)


def _reason(error: UnexpectedResponse) -> str:
    """Qdrant's own words, else the beginning of what answered."""
    try:
        return str(error.structured()["status"]["error"])
    except (ValueError, KeyError, TypeError):
        return error.content.decode(errors="replace")[:_LONGEST_REASON] or error.reason_phrase
