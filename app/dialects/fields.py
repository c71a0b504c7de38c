"""Types of fields that several dialects share, and what is made of fields with several names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError

from app.body import TEXTS_ADVICE
from app.schemas import check_truncation
from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import InputType, Side, TruncationOptions
from smart_embedder.vectors import OutputDtype

_LONGEST_WORD = 32
NumberType = Literal["float", "int8", "uint8", "binary", "ubinary"]
EmbeddingType = Literal["base64", NumberType]
EmbeddingTypes = Annotated[list[EmbeddingType], Field(fail_fast=True)]
# The numbers behind each type.
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
    """What texts are for: their type, and the names that models give to a prompt for just this."""

    input_type: InputType | None = None
    prompts: tuple[str, ...] = ()


_CODE = ("code", "nl2code", "code2code", "code2nl", "code2completion", "qa")
# By the values of `input_type` (Azure, Cohere, NVIDIA, Voyage), `task` (Jina) and `task_type`
# (Nomic). A model without a prompt of these names reads the one for the type, or its default.
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
    **{f"{each}.query": Task("query", (f"{each}.query", f"{each}_query")) for each in _CODE},
    **{
        f"{each}.passage": Task(
            "document", (f"{each}.passage", f"{each}_document", f"{each}_passage")
        )
        for each in _CODE
    },
}


def AnyCase(fold: Callable[[str], str]) -> BeforeValidator:  # noqa: N802 - stands among types
    """Folds the case of a string before its value is checked, unless it is long for one."""

    def folded(value: Any) -> Any:
        return fold(value) if isinstance(value, str) and len(value) <= _LONGEST_WORD else value

    return BeforeValidator(folded)


# A field of another server that is not read here: it stands in a schema with `unless`.
Refused = Annotated[Any, Field(description="Refused.")]


def unless(*harmless: Any) -> AfterValidator:
    """Refuses every value of a field but null, empty and `harmless` ones, which change nothing.

    As everywhere in these bodies, a string may stand for a number or a boolean. A list may hold one
    value for each text.
    """
    shown = f"nothing but {orjson.dumps(harmless[0]).decode()} is" if harmless else "this is not"
    strings = {str(each).casefold() for each in harmless}

    def is_harmless(value: Any) -> bool:
        if isinstance(value, str):
            return len(value) <= _LONGEST_WORD and value.casefold() in strings
        return value in harmless

    def check(value: Any) -> Any:
        if value is None or value in ([], {}, "") or is_harmless(value):
            return value
        if isinstance(value, list) and all(map(is_harmless, value)):
            return value
        raise PydanticCustomError("refused", f"{shown} done here, so leave it out")

    return AfterValidator(check)


Truncate = Annotated[
    bool | Literal["NONE", "START", "END"] | None,
    AnyCase(str.upper),
    Field(description="Cut texts that are too long, as by default; false or NONE: an error."),
]
Truncation = Annotated[bool | None, Field(description="Voyage's name for it.")]
TruncationSide = Annotated[
    Side | None, Field(description="Where texts are cut; left: the beginning.")
]
_SIDES: Mapping[Any, Side] = {"START": "left", "END": "right"}


def truncation_of(
    how: bool | str | None, side: Side | None = None, max_tokens: int | None = None
) -> TruncationOptions:
    """How texts are cut, from the values of `Truncate` and `TruncationSide`.

    Raises `InvalidRequestError` for values that contradict each other.
    """
    if side is not None and _SIDES.get(how, side) != side:
        raise InvalidRequestError("the fields truncate and truncation_side differ: send one")
    truncate = how not in {False, "NONE"}
    options = TruncationOptions(truncate, _SIDES.get(how, side or "right"), max_tokens)
    check_truncation(options.truncate, options.side)
    return options


def value_of(body: BaseModel, *names: str) -> Any:
    """The value of a field with several names; raises `InvalidRequestError` for two values."""
    values = [value for name in names if (value := getattr(body, name)) is not None]
    if any(value != values[0] for value in values):
        raise InvalidRequestError(
            f"the fields {', '.join(names[:-1])} and {names[-1]} mean the same and differ: send "
            "one of them"
        )
    return values[0] if values else None


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


def as_text(value: Any) -> Any:
    """The text of an object that has one."""
    return value["text"] if isinstance(value, dict) and "text" in value else value


def _of_objects(value: Any) -> Any:
    """The texts of Jina's objects, which hold nothing else, such as an image."""
    items = value if isinstance(value, list) else [value]
    texts = [
        as_text(item) if isinstance(item, dict) and item.keys() <= {"id", "text"} else item
        for item in items
    ]
    return texts if isinstance(value, list) else texts[0]


_NOT_EMPTY: dict[str, Any] = {"minItems": 1}
# A list, as it is described, or one text.
TextsOrText = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(_as_texts),
    Field(description="Texts, each for itself; or one text.", json_schema_extra=_NOT_EMPTY),
]
# The same, of texts or objects.
TextsOrObjects = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(lambda value: _as_texts(_of_objects(value))),
    Field(
        description="Texts, each for itself; or one text. Objects may have `text` alone.",
        json_schema_extra=_NOT_EMPTY,
    ),
]
