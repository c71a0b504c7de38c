"""The bodies of requests."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, model_validator

from app.context import (
    NATIVE,
    NATIVE_EMBEDDINGS,
    RERANK,
    Dialect,
    Endpoint,
)
from app.settings import Settings
from smart_embedder.errors import EmptyInputError, InvalidRequestError
from smart_embedder.interface import LoadedModels
from smart_embedder.requests import InputType, Side
from smart_embedder.settings import MAX_PROMPT_CHARACTERS
from smart_embedder.vectors import MAX_POOL_FACTOR, MuveraSide, OutputDtype

EMBEDDING_REQUEST: dict[str, JsonValue] = {
    "sentences": ["What is hybrid search?", "It joins meaning and exact words in one ranking."],
    "return_colbert": False,
}

RERANK_REQUEST: dict[str, JsonValue] = {
    "query": "What is hybrid search?",
    "passages": ["A recipe for bread.", "It joins meaning and exact words in one ranking."],
}
# Names of the same fields in other services.
_TEXT_ALIASES = ("text", "texts", "input", "inputs", "content", "docs", "document", "documents")

# Every list stops at its first bad item: an error for each would cost more than the work.
Texts = Annotated[list[str], FailFast()]

# What clients of OpenAI send in one request, and most of them cannot be told otherwise.
OPENAI_TEXTS = 2_048

# Only described: the endpoints check it themselves, because the status is 400 and not 422.
_NOT_EMPTY: dict[str, JsonValue] = {"minItems": 1}
_NOT_BLANK: dict[str, JsonValue] = {"minLength": 1, "pattern": r"\S"}


PROMPT_SCHEMA: dict[str, JsonValue] = {"minLength": 1, "maxLength": MAX_PROMPT_CHARACTERS}

Truncate = Annotated[bool, Field(description="Cut texts that are too long; false: an error.")]
TruncationSide = Annotated[Side, Field(description="Where texts are cut; left: the beginning.")]


ModelName = Annotated[
    str | None,
    Field(description="Any name of a model, as /v1/models lists them; the default one without it."),
]


# Of one body, in an error: each takes time to find, and to word.
MAX_PROBLEMS = 10
# Of a string where no text belongs: pydantic would convert and hash it, 50 ms for 32 MiB.
_MAX_OPTION = 16_384


def invalid_body(message: str, pointer: str = "") -> InvalidRequestError:
    """The error for a body that has one problem, at `pointer`."""
    return InvalidRequestError(message, [{"pointer": pointer, "message": message}])


def _takes_text(kind: Any) -> bool:
    """Whether a field of this type takes any string."""
    return kind in {str, Any, JsonValue} or any(map(_takes_text, get_args(kind)))


class RequestModel(BaseModel):
    """Strict: no conversion between types, no unknown fields.

    A request with this body belongs to `dialect`, and metrics count it under `endpoint`. Where
    several schemas share a path, only this one has the field that `discriminator` names. Error
    messages show `example`, and suggest a field for a name in `aliases`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    dialect: ClassVar[Dialect] = NATIVE
    endpoint: ClassVar[Endpoint]
    discriminator: ClassVar[str]
    example: ClassVar[Mapping[str, JsonValue]]
    aliases: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _limit_errors(cls, value: Any) -> Any:
        """Keep the first MAX_PROBLEMS unknown names: an error for each costs more than the work.

        Raises `InvalidRequestError` for a very long string where the field takes no text.
        """
        if not isinstance(value, dict):
            return value
        fields, unknown = cls.model_fields, list[str]()
        for name, sent in value.items():
            if name not in fields:
                unknown.append(name)
                continue
            longest = 0
            for each in sent if isinstance(sent, list) else [sent]:
                if isinstance(each, str) and len(each) > longest:
                    longest = len(each)
            if longest > _MAX_OPTION and not _takes_text(fields[name].annotation):
                message = f"the field {name} holds a string of {longest} characters, and no text"
                raise invalid_body(message, f"/{name}")
        if len(unknown) <= MAX_PROBLEMS or cls.model_config["extra"] != "forbid":
            return value
        dropped = set(unknown[MAX_PROBLEMS:])
        return {name: sent for name, sent in value.items() if name not in dropped}


class ForeignRequest(RequestModel):
    """A request of another API, read as that API reads it.

    Its clients send fields that are of no interest here, and strings for numbers and booleans.
    """

    model_config = ConfigDict(
        extra="ignore",
        strict=False,
        json_schema_extra=lambda schema, model: schema.update(examples=[model.example]),
    )


class _Sentences(RequestModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    sentences: Annotated[Texts, Field(json_schema_extra=_NOT_EMPTY)]
    """Texts, each embedded by itself."""


class EmbeddingFields(RequestModel):
    """How texts are read, which kinds of vectors are returned, and what is made of them."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    example = {"return_colbert": False}
    aliases = (
        {kind: f"return_{kind}" for kind in ("dense", "sparse", "colbert", "tokens")}
        | dict.fromkeys(("instruction", "instruct", "task", "prefix"), "prompt")
        | dict.fromkeys(("dim", "dims", "dimension", "output_dimension"), "dimensions")
        | {"normalize": "normalize_dense", "truncation_direction": "truncation_side"}
    )

    return_dense: bool = True
    """One vector for each text."""
    return_sparse: bool = True
    """Lexical weights of each text."""
    return_colbert: bool = True
    """One vector for each token."""
    normalize_dense: bool = False
    """Scale dense to unit length; bge-m3's always has it."""
    sparse_as_indices: bool = False
    """Sparse as indices and values, as Qdrant takes them."""
    dimensions: int | None = None
    """So many numbers of dense, scaled to unit length; for Qwen3-Embedding."""
    truncate: Truncate = True
    truncation_side: TruncationSide = "right"
    prompt: Annotated[str | None, Field(json_schema_extra=PROMPT_SCHEMA)] = None
    """Read before each text by the dense model."""
    prompt_name: str | None = None
    """A prompt of the dense model's sentence-transformers configuration."""
    input_type: InputType | None = None
    """Chooses the dense model's prompt for it."""
    return_tokens: bool = False
    """The tokens behind the sparse weights and ColBERT vectors."""
    output_dtype: OutputDtype = "float32"
    """Of dense and ColBERT; as plain JSON float32, int8, uint8 and bits."""
    colbert_pool_factor: Annotated[int | None, Field(ge=2, le=MAX_POOL_FACTOR)] = None
    """One ColBERT vector for so many similar ones."""
    muvera: MuveraSide | None = None
    """Add one vector that stands for a text's ColBERT vectors."""
    encoding: Literal["float", "base64"] = "float"
    """base64: arrays of JSON are raw bytes, little-endian."""
    if_vector_space: str | None = None
    """Ids of vector spaces, as of an answer before: 412 where these vectors are of others."""
    model: ModelName = None


# In this order pydantic has the texts first.
class EmbeddingRequest(EmbeddingFields, _Sentences):
    """Texts to embed, and which kinds of vectors to return."""

    model_config = ConfigDict(json_schema_extra={"examples": [EMBEDDING_REQUEST]})
    endpoint, discriminator = NATIVE_EMBEDDINGS, "sentences"
    example = {"sentences": ["What is hybrid search?"]}
    aliases = {
        **EmbeddingFields.aliases,
        **dict.fromkeys((*_TEXT_ALIASES, "passages", "query"), "sentences"),
    }


# Bounded so that a mean of scores stays a number.
Weight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class RerankWeights(RequestModel):
    """How much each of bge-m3's scores counts in late interaction."""

    example = {"dense": 1, "sparse": 0.5, "colbert": 1}

    dense: Weight = 1.0
    sparse: Weight = 1.0
    colbert: Weight = 1.0


class RerankBody(RequestModel):
    """A query and the passages to order for it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [RERANK_REQUEST]}, use_attribute_docstrings=True
    )
    endpoint, discriminator = RERANK, "passages"
    example = {
        "query": "What is hybrid search?",
        "passages": ["A recipe for bread.", "It joins two rankings."],
    }
    aliases = (
        dict.fromkeys((*_TEXT_ALIASES, "sentences", "candidates"), "passages")
        | dict.fromkeys(("q", "question", "search", "prompt"), "query")
        | {"task": "instruction"}
    )

    query: Annotated[str, Field(json_schema_extra=_NOT_BLANK)]
    passages: Annotated[Texts, Field(json_schema_extra=_NOT_EMPTY)]
    """Texts, each scored by itself."""
    normalize: bool = False
    """Sigmoid of bge-reranker's logit; changes no other score."""
    instruction: str | None = None
    """The task, for rerankers that read one (Qwen3-Reranker)."""
    weights: RerankWeights | None = None
    """For late interaction; equal by default."""
    truncate: Truncate = True
    truncation_side: TruncationSide = "right"
    if_vector_space: str | None = None
    """As of an answer before: 412 where these scores are of another model."""
    model: ModelName = None


def check_texts(
    texts: Sequence[object], field: str, most: int, setting: str = "MAX_SENTENCES_PER_REQUEST"
) -> None:
    """Raise `EmptyInputError` where there are none, `InvalidRequestError` for more than `most`."""
    if not texts:
        raise EmptyInputError(f"the list {field} is empty: send at least one text")
    if len(texts) > most:
        raise InvalidRequestError(
            f"the list {field} holds {len(texts)} texts, and at most {most} are allowed "
            f"({setting}): send them in several requests"
        )


def check_passages(query: str, passages: Sequence[object], field: str, settings: Settings) -> None:
    """The same for passages; raises `EmptyInputError` for a blank query, too."""
    if not query.strip():
        raise EmptyInputError("the query is blank: send what the passages are to be judged by")
    check_texts(passages, field, settings.max_rerank_passages, "MAX_RERANK_PASSAGES")


def check_truncation(truncate: bool, side: Side) -> None:
    """Raise `InvalidRequestError` for a truncation side that has no effect without `truncate`."""
    if not truncate and side == "left":
        raise InvalidRequestError(
            "the option truncation_side has no effect without truncate: leave it out, or set "
            "truncate to true"
        )


def check_rerank_options(
    models: LoadedModels, *, instruction: str | None = None, weights: object = None
) -> None:
    """Raise `InvalidRequestError` for an option that the model would ignore.

    Without a reranker it raises nothing: the engine has an error for that.
    """
    reranker = models.reranker
    if reranker is None and not models.late_interaction:
        return
    if weights is not None and reranker is not None:
        raise InvalidRequestError(
            f"the option weights has no effect with the reranker {reranker.name}, which gives one "
            "score: leave it out (it is for RERANKER_MODEL=late-interaction)"
        )
    if instruction is not None and not (reranker is not None and reranker.reads_instruction):
        name = (reranker or models.embedder).name
        raise InvalidRequestError(
            f"the option instruction has no effect with the reranker {name}, which reads none: "
            "leave it out (it is for Qwen3-Reranker)"
        )
