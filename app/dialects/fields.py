"""Field types that several dialects share, and readers of fields that have several names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError

from app.body import TEXTS_ADVICE
from app.images import TextsOrImages
from app.schemas import check_truncation
from smart_embedder.errors import InvalidRequestError
from smart_embedder.interface import Model
from smart_embedder.requests import InputType, Side, TruncationOptions
from smart_embedder.vectors import OutputDtype

_MAX_CHOICE_LENGTH = 32
NumberType = Literal["float", "int8", "uint8", "binary", "ubinary"]
EmbeddingType = Literal["base64", NumberType]
EmbeddingTypes = Annotated[list[EmbeddingType], Field(fail_fast=True)]
# The engine's number type for each type of the APIs.
DTYPES: Mapping[EmbeddingType, OutputDtype] = {
    "float": "float32",
    "base64": "float32",
    "int8": "int8",
    "uint8": "uint8",
    "binary": "binary",
    "ubinary": "ubinary",
}


@dataclass(frozen=True, slots=True)
class Task:
    """The purpose of texts: the input type, and the names of prompts that models have for it."""

    input_type: InputType | None = None
    prompts: tuple[str, ...] = ()


_CODE_TASKS = ("code", "nl2code", "code2code", "code2nl", "code2completion", "qa")
# Keys are the values of `input_type` (Azure, Cohere, NVIDIA, Voyage), `task` (Jina) and `task_type`
# (Nomic). A model without a prompt of these names uses the one for the type, or its default.
TASKS: Mapping[str, Task] = {
    "text": Task(),
    "query": Task("query"),
    "document": Task("document"),
    "passage": Task("document"),
    "search_query": Task("query", ("search_query",)),
    "search_document": Task("document", ("search_document",)),
    "retrieval.query": Task("query", ("retrieval.query", "Retrieval-query")),
    "retrieval.passage": Task("document", ("retrieval.passage", "Retrieval-document")),
    "classification": Task(None, ("classification", "Classification")),
    "clustering": Task(None, ("clustering", "Clustering")),
    "separation": Task(None, ("separation", "clustering", "Clustering")),
    "text-matching": Task(None, ("text-matching", "STS")),
    **{f"{task}.query": Task("query", (f"{task}.query", f"{task}_query")) for task in _CODE_TASKS},
    **{
        f"{task}.passage": Task(
            "document", (f"{task}.passage", f"{task}_document", f"{task}_passage")
        )
        for task in _CODE_TASKS
    },
}


def fold_case(fold: Callable[[str], str]) -> BeforeValidator:
    """Return a validator that folds the case of a string, unless it is too long to be a choice."""

    def fold_choice(value: Any) -> Any:
        return fold(value) if isinstance(value, str) and len(value) <= _MAX_CHOICE_LENGTH else value

    return BeforeValidator(fold_choice)


TruncatePromptTokens = Annotated[
    int | None,
    Field(ge=-1, description="vLLM's: -1, or at least as many tokens as the model reads."),
]


def check_prompt_tokens(tokens: int, model: Model) -> None:
    """Raise `InvalidRequestError` for `TruncatePromptTokens` below the limit of the model."""
    if 0 <= tokens < model.max_length:
        raise InvalidRequestError(
            f"the field truncate_prompt_tokens is below the {model.max_length} tokens that "
            f"{model.name} reads: leave it out"
        )


# A field of another server that this service does not support; use it with `allow_only`.
Unsupported = Annotated[Any, Field(description="Refused.")]


def allow_only(*harmless: Any) -> AfterValidator:
    """Return a validator that refuses all values except null, empty and `harmless` ones.

    As everywhere in these bodies, a string may stand for a number or a boolean. A list may hold one
    value for each text.
    """
    shown = f"nothing but {orjson.dumps(harmless[0]).decode()} is" if harmless else "this is not"
    strings = {str(value).casefold() for value in harmless}

    def is_harmless(value: Any) -> bool:
        if isinstance(value, str):
            return len(value) <= _MAX_CHOICE_LENGTH and value.casefold() in strings
        return value in harmless

    def check(value: Any) -> Any:
        if value is None or value in ([], {}, "") or is_harmless(value):
            return value
        if isinstance(value, list) and all(map(is_harmless, value)):
            return value
        raise PydanticCustomError("refused", f"{shown} supported here: leave the field out")

    return AfterValidator(check)


Truncate = Annotated[
    bool | Literal["NONE", "START", "END"] | None,
    fold_case(str.upper),
    Field(description="Cut long texts, the default; false or NONE: a long text is an error."),
]
Truncation = Annotated[bool | None, Field(description="Voyage's name for it.")]
TruncationSide = Annotated[
    Side | None, Field(description="The side at which texts are cut; left: the beginning.")
]
_SIDES: Mapping[Any, Side] = {"START": "left", "END": "right"}


def build_truncation(
    truncate: bool | str | None, side: Side | None = None, max_tokens: int | None = None
) -> TruncationOptions:
    """Convert the values of `Truncate` and `TruncationSide` to the engine's options.

    Raises `InvalidRequestError` for values that contradict each other.
    """
    if side is not None and _SIDES.get(truncate, side) != side:
        raise InvalidRequestError("the fields truncate and truncation_side differ: send one")
    options = TruncationOptions(
        truncate not in {False, "NONE"}, _SIDES.get(truncate, side or "right"), max_tokens
    )
    check_truncation(options.truncate, options.side)
    return options


def merge_aliases(body: BaseModel, *names: str) -> Any:
    """Return the value of a field with several names; raise `InvalidRequestError` if they differ.

    Returns None if no name is set.
    """
    values = [value for name in names if (value := getattr(body, name)) is not None]
    if any(value != values[0] for value in values):
        raise InvalidRequestError(
            f"the fields {', '.join(names[:-1])} and {names[-1]} mean the same and differ: send "
            "one of them"
        )
    return values[0] if values else None


def _wrap_text(value: Any) -> Any:
    """Put a single text into a list; refuse token ids with advice on how to send texts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and _is_token_ids(value[0]):
        raise PydanticCustomError(
            "token_ids",
            f"it holds token ids, and those of another model mean nothing here: {TEXTS_ADVICE}",
        )
    return value


def _is_token_ids(item: Any) -> bool:
    if isinstance(item, list):
        return all(isinstance(token_id, int) for token_id in item[:1])
    return isinstance(item, int) and not isinstance(item, bool)


def extract_text(value: Any) -> Any:
    """Return the `text` of an object; return any other value unchanged."""
    return value["text"] if isinstance(value, dict) and "text" in value else value


def _extract_texts(value: Any) -> Any:
    """Replace Jina's objects by their texts, except objects with other content such as an image."""
    items = value if isinstance(value, list) else [value]
    texts = [
        extract_text(item) if isinstance(item, dict) and item.keys() <= {"id", "text"} else item
        for item in items
    ]
    return texts if isinstance(value, list) else texts[0]


_NOT_EMPTY: dict[str, Any] = {"minItems": 1}
# The schema describes a list; one text is accepted, too.
TextsOrText = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(_wrap_text),
    Field(description="A list of texts, or one text.", json_schema_extra=_NOT_EMPTY),
]
TextsOrObjects = Annotated[
    TextsOrImages,
    BeforeValidator(lambda value: _wrap_text(_extract_texts(value))),
    Field(
        description="A list of texts, or one text. A text may be an object with only `text`, or "
        "with only `image`.",
        json_schema_extra=_NOT_EMPTY,
    ),
]
