"""One table from the product's errors to HTTP statuses, and one shape for every error body."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from app import errors
from app.errors import SmartEmbedderError

STATUS_OF: Mapping[type[SmartEmbedderError], int] = {
    errors.EmptyInputError: 400,
    errors.UnauthorizedError: 401,
    errors.BodyTooLargeError: 413,
    errors.InvalidRequestError: 422,
    errors.RateLimitedError: 429,
    errors.ClientGoneError: 499,
    errors.UnavailableError: 503,
    errors.InferenceTimeoutError: 504,
    errors.SmartEmbedderError: 500,
}


def status_of(error: SmartEmbedderError) -> int:
    """The status of the nearest class in the table."""
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def error_response(scope: Scope, error: SmartEmbedderError) -> Response:
    """The answer to a request that failed with `error`; notes its code for logs and metrics."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if isinstance(error, errors.UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    extra = {"errors": error.problems} if isinstance(error, errors.InvalidRequestError) else {}
    body = _body(scope, error.code, _sentence(str(error))) | extra
    return _response(body, status_of(error), headers)


def internal_error_response(scope: Scope) -> Response:
    """The answer to a request that failed in a way nobody foresaw; says nothing of the cause."""
    detail = "The request failed inside the service. The log holds the cause under this request id."
    return _response(_body(scope, "internal_error", detail), 500)


def install_error_handlers(app: FastAPI) -> None:
    """Answer the product's errors and unknown routes in the one shape."""
    app.add_exception_handler(SmartEmbedderError, _handle_own)
    app.add_exception_handler(HTTPException, _handle_http)


async def _handle_own(request: Request, error: Exception) -> Response:
    assert isinstance(error, SmartEmbedderError)  # noqa: S101 - Starlette's signature is wider
    return error_response(request.scope, error)


async def _handle_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette's signature is wider
    code = HTTPStatus(error.status_code).name.lower()
    headers = dict(error.headers or {})
    return _response(
        _body(request.scope, code, _sentence(error.detail)), error.status_code, headers
    )


def _body(scope: Scope, code: str, detail: str) -> dict[str, Any]:
    state = scope.setdefault("state", {})
    state["error_code"] = code
    return {"detail": detail, "code": code, "request_id": state.get("request_id")}


def _response(
    body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
