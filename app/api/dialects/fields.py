"""Types of fields that several dialects share."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.api.body import TEXTS_ADVICE


def AnyCase(fold: Callable[[str], str]) -> BeforeValidator:  # noqa: N802 - stands among types
    """Folds the case of a string before its value is checked."""
    return BeforeValidator(lambda value: fold(value) if isinstance(value, str) else value)


_TEXTS_OR_TEXT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ],
    "description": "A text, or a list of texts, each for itself.",
}


def _as_texts(value: Any) -> Any:
    """A list of one text for a text; the error for token ids says how to send texts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and _are_token_ids(value[0]):
        raise PydanticCustomError(
            "token_ids",
            f"it holds token ids, and those of another model mean nothing here: {TEXTS_ADVICE}",
        )
    return value


def _are_token_ids(item: Any) -> bool:
    if isinstance(item, list):
        return all(isinstance(each, int) for each in item[:1])
    return isinstance(item, int) and not isinstance(item, bool)


# One text or several, as a list.
TextsOrText = Annotated[
    list[str], FailFast(), BeforeValidator(_as_texts), WithJsonSchema(_TEXTS_OR_TEXT)
]
