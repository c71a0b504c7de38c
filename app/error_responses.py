"""The statuses and responses of errors, and the messages about invalid bodies.

Each dialect defines the shape of its error bodies; see `app.context.Dialect`.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_args

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from app.context import ErrorFacts, context_of
from app.errors import (
    BodyStalledError,
    BodyTooLargeError,
    ClientGoneError,
    ForeignOriginError,
    NotOperatorError,
    RateLimitedError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedMediaError,
)
from app.logs import escape_text
from app.schemas import MAX_PROBLEMS, RequestModel, invalid_body
from smart_embedder import errors
from smart_embedder.errors import InvalidRequestError, SmartEmbedderError

log = structlog.get_logger(__name__)

STATUS_OF: Mapping[type[SmartEmbedderError], int] = {
    errors.EmptyInputError: 400,
    errors.KindNotMadeError: 400,
    UnauthorizedError: 401,
    ForeignOriginError: 403,
    UnknownModelError: 404,
    BodyStalledError: 408,
    errors.VectorSpaceDiffersError: 412,
    BodyTooLargeError: 413,
    UnsupportedMediaError: 415,
    errors.InvalidRequestError: 422,
    NotOperatorError: 403,
    RateLimitedError: 429,
    ClientGoneError: 499,
    # No 503: clients that retry by themselves would crash one device after the other.
    errors.DeviceCrashedError: 500,
    errors.UnavailableError: 503,
    errors.InferenceTimeoutError: 504,
    errors.SmartEmbedderError: 500,
}
# Statuses of dialects whose servers have no 422.
NO_422: Mapping[str, int] = {"invalid_request": 400, "text_too_long": 400}
_RETRY_AFTER_MEMORY = 30
_MAX_POINTER = 200
# How many unknown names are compared with the name of a missing field.
_MAX_SEARCHED = 3
_MAX_NAME = 60

_ALLOWED = {
    "list_type": "send a list of strings",
    "string_type": "send a string",
    "text_or_image": 'send a string, or {"image": "data:image/png;base64,..."}',
    "bool_type": "send true or false",
    "float_type": "send a number",
    "int_type": "send a whole number",
    "int_from_float": "send a whole number",
    "finite_number": "send a finite number",
}

Item = Mapping[str, Any]
Location = tuple[int | str, ...]


def status_of(error: SmartEmbedderError) -> int:
    """The status of the error's class, or of its nearest base class in the table."""
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def error_response(scope: Scope, error: SmartEmbedderError) -> Response:
    """Create the response for `error`, and record its code for logs and metrics."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UnsupportedMediaError):
        headers |= {"Accept": "application/json", "Accept-Encoding": "identity"}
    if isinstance(error, BodyStalledError):
        headers["Connection"] = "close"
    problems = error.problems if isinstance(error, errors.InvalidRequestError) else None
    facts = ErrorFacts(_sentence(str(error)), error.code, status_of(error), problems)
    return _response(scope, facts, headers)


def internal_error_response(scope: Scope, error: Exception) -> Response:
    """Create the response for an unexpected exception, without revealing the cause.

    A lack of memory for a body, its tokens or its response is temporary and gets 503.
    """
    if isinstance(error, MemoryError):
        message = (
            "the service has too little memory for this request now; send fewer or shorter texts, "
            "or try again later"
        )
        return error_response(
            scope, errors.OutOfMemoryError(message, retry_after=_RETRY_AFTER_MEMORY)
        )
    detail = "The request failed inside the service. The log holds the cause under this request id."
    return _response(scope, ErrorFacts(detail, "internal_error", 500))


def install_error_handlers(app: FastAPI) -> None:
    """Answer the service's errors, a lack of memory and unknown routes in the dialect's shape."""
    app.add_exception_handler(SmartEmbedderError, handle_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(MemoryError, handle_error)


async def handle_error(request: Request, error: Exception) -> Response:
    """Create the response for an error of the service, or for a lack of memory outside the models.

    The engine raises `OutOfMemoryError` for a lack of memory in the models.
    """
    if isinstance(error, SmartEmbedderError):
        return error_response(request.scope, error)
    request_id = context_of(request.scope).request_id
    log.warning("request_out_of_memory", request_id=request_id, reason=str(error) or None)
    return internal_error_response(request.scope, error)


async def _handle_http_exception(request: Request, error: Any) -> Response:
    status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
    path, contexts = context_of(request.scope).route, iter_route_contexts(request.app.routes)
    routes = [route for route in contexts if isinstance(route.original_route, Route)]
    if status == HTTPStatus.NOT_FOUND:
        known = {
            str(route.path_format): " or ".join(route.methods or ())
            for route in routes
            if isinstance(route.original_route, APIRoute) and route.include_in_schema
        }
        near = difflib.get_close_matches(path.lower(), known, 1)
        advice = f"did you mean {known[near[0]]} {near[0]}? " if near else ""
        detail = f"there is no {escape_text(path)} here: {advice}/docs lists every path"
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names the methods of one route, but a path may have several routes.
        matching = [route for route in routes if route.path_regex.match(path)]
        methods = {method for route in matching for method in route.methods or ()}
        headers["Allow"] = allowed = ", ".join(sorted(methods or {"GET", "HEAD"}))
        detail = f"{request.method} is not allowed for {escape_text(path)}, but {allowed}"
    code = HTTPStatus(status).name.lower()
    return _response(request.scope, ErrorFacts(_sentence(detail), code, status), headers)


def _response(
    scope: Scope, error: ErrorFacts, headers: Mapping[str, str] | None = None
) -> Response:
    """Create the response, with the fields of all dialects and the status of the first."""
    context = context_of(scope)
    context.error_code, context.error_status = error.code, error.status
    bodies = [dialect.error_body(error, context.request_id) for dialect in context.dialects]
    body = {name: value for fields in reversed(bodies) for name, value in fields.items()}
    status = context.dialects[0].statuses.get(error.code, error.status)
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def invalid_json_error(reason: str, model: type[RequestModel], size: int) -> InvalidRequestError:
    """Create the error for a body of `size` bytes that is not JSON, with an example of `model`."""
    if not size:
        return invalid_body(f"the body is empty: send {_example(model)}")
    return invalid_body(
        f"the body of {size} bytes is not JSON ({reason}): send an object such as {_example(model)}"
    )


def invalid_request_error(
    found: Sequence[dict[str, Any]], model: type[RequestModel], most: int = MAX_PROBLEMS
) -> InvalidRequestError:
    """Create the error for a body in which pydantic found these errors; list the first `most`."""
    for item in found:
        item["loc"] = tuple(part for part in item["loc"] if not _is_branch(part, item["type"]))
    unknown = [
        str(item["loc"][0])[:_MAX_NAME]
        for item in found
        if item["type"] == "extra_forbidden" and len(item["loc"]) == 1
    ]
    problems = [
        {"pointer": _pointer(item["loc"]), "message": _message(item, model, unknown)}
        for item in found[:most]
    ]
    return InvalidRequestError(problems[0]["message"], problems)


def _is_branch(part: int | str, kind: str) -> bool:
    """Whether this part of a location is a branch of a union instead of a field."""
    may_be_branch = kind != "extra_forbidden" and isinstance(part, str)
    return may_be_branch and str(part).startswith(("literal[", "list["))


def _message(item: Item, model: type[RequestModel], unknown: list[str]) -> str:
    location: Location = item["loc"]
    name, kind = str(location[-1]) if location else "", item["type"]
    if kind == "missing":
        if not unknown and isinstance(item["input"], dict):
            # Schemas that ignore unknown fields report no errors for them.
            unknown = [alias for alias in model.aliases if alias in item["input"]]
        aliases = [sent for sent in unknown if model.aliases.get(sent.lower()) == name]
        near = (sent for sent in unknown[:_MAX_SEARCHED] if _suggest(sent, model) == name)
        found = next(iter(aliases), None) or next(near, None)
        if found is None:
            return f"the field {name} is missing: send it, as in {_example(model)}"
        return (
            f"the field {name} is missing: rename {escape_text(found)} to {name}, as in "
            f"{_example(model)}"
        )
    if kind == "extra_forbidden":
        name, nearest = name[:_MAX_NAME], _model_at(location, model)
        meant = _suggest(name, nearest)
        advice = f"did you mean {meant}? There are" if meant else "there are"
        fields = ", ".join(nearest.model_fields)
        return f"there is no field {escape_text(name)} here: {advice} {fields}"
    return _wrong_value(item, model)


def _wrong_value(item: Item, model: type[RequestModel]) -> str:
    location: Location = item["loc"]
    # Such as sentences[3] or weights.dense.
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    field = "".join(parts).removeprefix(".")
    name = f"the field {field}" if field else "the body"
    kind, sent = item["type"], _describe(item["input"])
    if kind in {"model_type", "model_attributes_type"}:
        expected = _model_at((*location, ""), model)
        return f"{name} is {sent}: send an object such as {_example(expected)}"
    if kind == "greater_than_equal":
        return f"{name} is out of range: send at least {item['ctx']['ge']:g}"
    if kind == "less_than_equal":
        return f"{name} is out of range: send at most {item['ctx']['le']:.0f}"
    allowed = f"send {item['ctx']['expected']}" if kind == "literal_error" else _ALLOWED.get(kind)
    if allowed is None:  # pydantic's own message, which quotes nothing.
        return f"{name}: {item['msg']}"
    example = f", as in {_example(model)}" if location[0] in model.example else ""
    return f"{name} is {sent}: {allowed}{example}"


def _model_at(location: Location, model: type[RequestModel]) -> type[RequestModel]:
    """Find the model that has the field at `location`: `model` itself or one nested in it."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        for kind in get_args(field.annotation) if field else ():
            if isinstance(kind, type) and issubclass(kind, RequestModel):
                model = kind
    return model


def _suggest(name: str, model: type[RequestModel]) -> str | None:
    """Find the field that an unknown name most likely stands for."""
    if (known := model.aliases.get(name.lower())) is not None:
        return known
    return next(iter(difflib.get_close_matches(name.lower(), model.model_fields, 1)), None)


def _describe(value: Any) -> str:
    """Describe the type and size of a value in the terms of JSON."""
    match value:
        case None | bool():
            return json.dumps(value)
        case float() if not math.isfinite(value):
            return json.dumps(value)  # NaN, Infinity or -Infinity.
        case int() | float():
            return "a number"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)} items"
        case _:
            return (
                f"{len(value)} bytes"
                if isinstance(value, bytes)
                else f"an object with {len(value)} fields"
            )


def _example(model: type[RequestModel]) -> str:
    return orjson.dumps(model.example).decode()


def _pointer(location: Location) -> str:
    parts = (str(part)[:_MAX_POINTER] for part in location)
    escaped = (part.replace("~", "~0").replace("/", "~1") for part in parts)
    return "".join(f"/{part}" for part in escaped)[:_MAX_POINTER]
