"""The table from errors to HTTP statuses, and the responses for errors."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from app import errors
from app.api.context import context_of, is_stream
from app.api.error_shapes import ErrorFacts, body_of, status_in
from app.errors import SmartEmbedderError
from app.observability.logs import escape_text

log = structlog.get_logger(__name__)

STATUS_OF: Mapping[type[SmartEmbedderError], int] = {
    errors.EmptyInputError: 400,
    errors.KindNotMadeError: 400,
    errors.UnauthorizedError: 401,
    errors.ForeignOriginError: 403,
    errors.UnknownModelError: 404,
    errors.BodyStalledError: 408,
    errors.AnswerNotTakenError: 408,
    errors.BodyTooLargeError: 413,
    errors.UnsupportedMediaError: 415,
    errors.InvalidRequestError: 422,
    errors.NotOperatorError: 403,
    errors.RateLimitedError: 429,
    errors.ClientGoneError: 499,
    # Clients that send it again by themselves would fail one device after the other.
    errors.DeviceCrashedError: 500,
    errors.UnavailableError: 503,
    errors.InferenceTimeoutError: 504,
    errors.SmartEmbedderError: 500,
}


_RETRY_AFTER_MEMORY = 30


def status_of(error: SmartEmbedderError) -> int:
    """The status of the nearest class in the table."""
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def error_facts(error: SmartEmbedderError) -> dict[str, Any]:
    """An error as it stands in a record of a stream."""
    facts = {"status": status_of(error), "code": error.code, "detail": _sentence(str(error))}
    return facts if error.retry_after is None else facts | {"retry_after": error.retry_after}


def error_response(scope: Scope, error: SmartEmbedderError) -> Response:
    """The response for `error`; records its code for logs and metrics."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if isinstance(error, errors.UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, errors.UnsupportedMediaError):
        accepted = "application/x-ndjson" if is_stream(scope) else "application/json"
        headers |= {"Accept": accepted, "Accept-Encoding": "gzip, identity"}
    # The rest of a stream would be parsed, and may have no end; on closing it is only dropped.
    if isinstance(error, errors.BodyStalledError) or is_stream(scope):
        headers["Connection"] = "close"
    problems = error.problems if isinstance(error, errors.InvalidRequestError) else None
    facts = ErrorFacts(_sentence(str(error)), error.code, status_of(error), problems)
    return _response(scope, facts, headers)


def unforeseen_error_response(scope: Scope, error: Exception) -> Response:
    """The response for an unexpected exception, which reveals nothing of the cause.

    A lack of memory for a body, its tokens or its response is temporary, and gets 503.
    """
    if isinstance(error, MemoryError):
        return error_response(scope, _out_of_memory())
    detail = "The request failed inside the service. The log holds the cause under this request id."
    return _response(scope, ErrorFacts(detail, "internal_error", 500))


def install_error_handlers(app: FastAPI) -> None:
    """Answer the service's errors, a lack of memory and unknown routes in the dialect's shape."""
    app.add_exception_handler(SmartEmbedderError, _handle_service_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(MemoryError, _handle_memory_error)


async def _handle_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SmartEmbedderError)  # noqa: S101 - Starlette's signature is wider
    return error_response(request.scope, error)


async def _handle_memory_error(request: Request, error: Exception) -> Response:
    """Outside the models, whose lack of memory the engine turns into `OutOfMemoryError`."""
    log.warning(
        "request_out_of_memory",
        request_id=context_of(request.scope).request_id,
        reason=str(error) or None,
    )
    return error_response(request.scope, _out_of_memory())


def _out_of_memory() -> errors.OutOfMemoryError:
    return errors.OutOfMemoryError(
        "the service has too little memory for this request now; send fewer or shorter texts, or "
        "try again later",
        retry_after=_RETRY_AFTER_MEMORY,
    )


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette's signature is wider
    status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
    known = _known_paths(request.app)
    path = context_of(request.scope).route
    if status == HTTPStatus.NOT_FOUND:
        detail = f"there is no {escape_text(path)} here; there are {_listed(known)}"
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        # The router knows the methods of a path with a name in it.
        methods = known.get(path) or sorted(headers.get("Allow", "GET, HEAD").split(", "))
        allowed = ", ".join(methods)
        headers["Allow"] = allowed
        detail = f"{request.method} is not allowed for {escape_text(path)}, but {allowed}"
    code = HTTPStatus(status).name.lower()
    return _response(request.scope, ErrorFacts(_sentence(detail), code, status), headers)


def _known_paths(app: FastAPI) -> dict[str, list[str]]:
    """The methods of each path that the API's description names."""
    known: dict[str, list[str]] = {}
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, APIRoute) and route.include_in_schema:
            known.setdefault(route.path_format or "", []).extend(sorted(route.methods or ()))
    return {
        path: [*methods, "HEAD"] if "GET" in methods else methods for path, methods in known.items()
    }


def _listed(known: dict[str, list[str]]) -> str:
    # The paths of one model repeat those at the root.
    shown = {path: methods for path, methods in known.items() if not path.startswith("/models/{")}
    return ", ".join([*(f"{methods[0]} {path}" for path, methods in shown.items()), "GET /docs"])


def _response(
    scope: Scope, error: ErrorFacts, headers: Mapping[str, str] | None = None
) -> Response:
    """The response for an error, with shape and status of the request's dialect."""
    context = context_of(scope)
    context.error_code, context.error_status = error.code, error.status
    body = orjson.dumps(body_of(error, context.request_id, context.dialects))
    status = status_in(context.dialects, error)
    return Response(body, status, headers, media_type="application/json")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
