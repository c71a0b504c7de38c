"""Reading a request body: bytes to a validated model, with errors that never quote the caller."""

import copy
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from app.api.json_limit import JsonPieceCounter
from app.api.media_type import require_json
from app.api.priority import PRIORITY_PARAMETER
from app.api.schemas import ErrorResponse, RequestModel
from app.api.validation_errors import as_invalid_request
from app.errors import ClientGoneError
from app.settings import Settings

Model = TypeVar("Model", bound=RequestModel)

_VALUES_BESIDES_TEXTS = 1024
_VALUES_FOR_A_TEXT = 16


def most_values(settings: Settings) -> int:
    """How many values a body may hold: enough to tell a caller of far too many texts so."""
    texts = max(settings.max_sentences_per_request, settings.max_rerank_passages)
    return _VALUES_BESIDES_TEXTS + _VALUES_FOR_A_TEXT * texts


async def read_body(request: Request, model: type[Model], most: int) -> Model:
    """The body as `model`.

    Raises `UnsupportedMediaError`, `InvalidRequestError` or `ClientGoneError`. A body of more than
    `most` values is refused before it is read whole.
    """
    require_json(request.headers)
    body = await _receive(request, JsonPieceCounter(most))
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise as_invalid_request(error, model, len(body)) from None


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


def with_most_items(operation: dict[str, Any], field: str, most: int) -> dict[str, Any]:
    """The operation with an upper limit for the list `field` of its JSON body."""
    operation = copy.deepcopy(operation)
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    schema["properties"][field]["maxItems"] = most
    return operation


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
