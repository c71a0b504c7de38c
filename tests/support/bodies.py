"""Validates a body as FastAPI does for an endpoint."""

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from app.error_responses import invalid_request_error
from app.schemas import RequestModel

Model = TypeVar("Model", bound=RequestModel)


def validate(value: Any, schema: type[Model]) -> Model:
    """Validate a parsed value; raises the error that a client would get."""
    try:
        return TypeAdapter(schema).validate_python(value, from_attributes=True)
    except ValidationError as error:
        found = [dict(item) for item in error.errors(include_url=False)]
        raise invalid_request_error(found, schema) from None
