"""Reading a request body: bytes to a validated model, with errors that never quote the caller."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from app.api.json_limit import JsonPieceCounter
from app.api.priority import PRIORITY_PARAMETER
from app.api.schemas import ErrorResponse, RequestModel
from app.errors import ClientGoneError, InvalidRequestError
from app.settings import Settings

Model = TypeVar("Model", bound=RequestModel)

_MOST_PROBLEMS = 10
_LONGEST_POINTER = 200
_VALUES_BESIDES_TEXTS = 1024
_VALUES_FOR_A_TEXT = 16


def most_values(settings: Settings) -> int:
    """How many values a body may hold: enough to tell a caller of far too many texts so."""
    texts = max(settings.max_sentences_per_request, settings.max_rerank_passages)
    return _VALUES_BESIDES_TEXTS + _VALUES_FOR_A_TEXT * texts


async def read_body(request: Request, model: type[Model], most: int) -> Model:
    """The body as `model`; raises `InvalidRequestError` or `ClientGoneError`.

    A body of more than `most` values is refused before it is read whole.
    """
    body = await _receive(request, JsonPieceCounter(most))
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid_request(error) from None


async def _receive(request: Request, pieces: JsonPieceCounter) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            pieces.feed(chunk)
            body += chunk
    except ClientDisconnect:
        raise ClientGoneError("the client left before its request was complete") from None
    return bytes(body)


def describe_body(model: type[RequestModel]) -> dict[str, Any]:
    """The part of an OpenAPI operation that describes `model` as its JSON body, and its headers."""
    schema = model.model_json_schema(ref_template="{model}")
    schema = _inline(schema, schema.pop("$defs", {}))
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "parameters": [PRIORITY_PARAMETER],
    }


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """A schema that refers to nothing outside itself."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The part of an OpenAPI operation that describes its errors."""
    return {status: {"model": ErrorResponse} for status in statuses}


def _as_invalid_request(error: ValidationError) -> InvalidRequestError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    problems = [
        {"pointer": _pointer(item["loc"]), "message": item["msg"]}
        for item in found[:_MOST_PROBLEMS]
    ]
    first = problems[0]
    where = f"{first['pointer']}: " if first["pointer"] else ""
    return InvalidRequestError(f"{where}{first['message']}", problems)


def _pointer(location: tuple[int | str, ...]) -> str:
    escaped = (str(part).replace("~", "~0").replace("/", "~1") for part in location)
    return "".join(f"/{part}" for part in escaped)[:_LONGEST_POINTER]
