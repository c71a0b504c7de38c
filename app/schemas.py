"""Schemas of request bodies, and checks that they cannot express."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, model_validator

from app.context import (
    EXTRACT,
    NATIVE,
    NATIVE_EMBEDDINGS,
    RERANK,
    Dialect,
    Endpoint,
)
from app.images import TextsOrImages
from app.settings import Settings
from smart_embedder.errors import EmptyInputError, InvalidRequestError
from smart_embedder.interface import LoadedModels
from smart_embedder.requests import Aggregation, InputType, Side
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
EXTRACT_REQUEST: dict[str, JsonValue] = {
    "texts": ["Ada Lovelace was born in London."],
    "threshold": 0.5,
}
# Names of the list of texts in other services.
_TEXT_ALIASES = ("text", "texts", "input", "inputs", "content", "docs", "document", "documents")

# Validation of a list stops at the first bad item: all errors would cost more than the work.
Texts = Annotated[list[str], FailFast()]

# Clients of OpenAI's API send this many texts in one request, most without a way to change it.
OPENAI_TEXTS = 2_048

# Only described: the endpoints check it, because the status is 400 instead of 422.
_NOT_EMPTY: dict[str, JsonValue] = {"minItems": 1}
_NOT_BLANK: dict[str, JsonValue] = {"minLength": 1, "pattern": r"\S"}

PROMPT_SCHEMA: dict[str, JsonValue] = {"minLength": 1, "maxLength": MAX_PROMPT_CHARACTERS}

Truncate = Annotated[bool, Field(description="Cut texts that are too long; false: an error.")]
TruncationSide = Annotated[Side, Field(description="Where texts are cut; left: the beginning.")]

ModelName = Annotated[
    str | None,
    Field(description="A name of a model in /v1/models; without it, the default model."),
]

# The most problems in the error for one body: each takes time to find and describe.
MAX_PROBLEMS = 10
# The longest string in a field without texts: pydantic would take 50 ms to hash 32 MiB.
_MAX_OPTION = 16_384


def invalid_body(message: str, pointer: str = "") -> InvalidRequestError:
    """Create the error for a body with one problem, at `pointer`."""
    return InvalidRequestError(message, [{"pointer": pointer, "message": message}])


def _takes_text(kind: Any) -> bool:
    """Whether a field of this type accepts any string."""
    return kind in {str, Any, JsonValue} or any(map(_takes_text, get_args(kind)))


class RequestModel(BaseModel):
    """A strict body: no conversion between types, no unknown fields.

    A request with this body belongs to `dialect`, and metrics count it under `endpoint`. Where
    several schemas share a path, only this one has the field that `discriminator` names. Error
    messages show `example`, and suggest a field for a name in `aliases`. With `reads_token_ids`,
    the field `input` may hold token ids, which are decoded before validation if TOKEN_IDS is set.
    With `reads_message_pack`, the body may also be MessagePack.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    dialect: ClassVar[Dialect] = NATIVE
    endpoint: ClassVar[Endpoint]
    discriminator: ClassVar[str]
    example: ClassVar[Mapping[str, JsonValue]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    reads_token_ids: ClassVar[bool] = False
    reads_message_pack: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _limit_errors(cls, value: Any) -> Any:
        """Keep only the first MAX_PROBLEMS unknown names, as each costs an error.

        Raises `InvalidRequestError` for a very long string in a field that takes no text.
        """
        if not isinstance(value, dict):
            return value
        fields, unknown = cls.model_fields, list[str]()
        for name, sent in value.items():
            if name not in fields:
                unknown.append(name)
                continue
            longest = 0
            for item in sent if isinstance(sent, list) else [sent]:
                if isinstance(item, str) and len(item) > longest:
                    longest = len(item)
            if longest > _MAX_OPTION and not _takes_text(fields[name].annotation):
                message = f"the field {name} has a string of {longest} characters: it takes no text"
                raise invalid_body(message, f"/{name}")
        if len(unknown) <= MAX_PROBLEMS or cls.model_config["extra"] != "forbid":
            return value
        dropped = set(unknown[MAX_PROBLEMS:])
        return {name: sent for name, sent in value.items() if name not in dropped}


class ForeignRequest(RequestModel):
    """A body of another API, validated as leniently as there.

    Unknown fields are ignored, and strings are accepted for numbers and booleans.
    """

    model_config = ConfigDict(
        extra="ignore",
        strict=False,
        json_schema_extra=lambda schema, model: schema.update(examples=[model.example]),
    )


class _Sentences(RequestModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    sentences: Annotated[TextsOrImages, Field(json_schema_extra=_NOT_EMPTY)]
    """The texts to embed, or pictures if the model reads them: `{"image": "data:..."}`."""


class EmbeddingFields(RequestModel):
    """How texts are read, which kinds of vectors are returned, and in which form."""

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
    """Scale dense vectors to unit length; those of bge-m3 always have it."""
    sparse_as_indices: bool = False
    """Return sparse vectors as indices and values, as Qdrant takes them."""
    dimensions: int | None = None
    """Keep this many numbers of dense vectors, scaled to unit length; for Qwen3-Embedding."""
    truncate: Truncate = True
    truncation_side: TruncationSide = "right"
    prompt: Annotated[str | None, Field(json_schema_extra=PROMPT_SCHEMA)] = None
    """A text that the dense model reads before each text."""
    prompt_name: str | None = None
    """The name of a prompt in the dense model's sentence-transformers configuration."""
    input_type: InputType | None = None
    """Chooses the dense model's prompt for queries or documents."""
    return_tokens: bool = False
    """The tokens behind the sparse weights and ColBERT vectors."""
    output_dtype: OutputDtype = "float32"
    """The type of dense and ColBERT vectors; plain JSON has float32, int8, uint8 and bits."""
    colbert_pool_factor: Annotated[int | None, Field(ge=2, le=MAX_POOL_FACTOR)] = None
    """Pool similar ColBERT vectors, so that one is left for this many."""
    muvera: MuveraSide | None = None
    """Add one vector that summarizes the ColBERT vectors of a text."""
    encoding: Literal["float", "base64"] = "float"
    """base64: arrays are little-endian bytes in base64."""
    if_vector_space: str | None = None
    """Ids of vector spaces from an earlier response: 412 if these vectors are in others."""
    model: ModelName = None


# In this order of base classes, `sentences` is the first field.
class EmbeddingRequest(EmbeddingFields, _Sentences):
    """Texts to embed, and which kinds of vectors to return."""

    model_config = ConfigDict(json_schema_extra={"examples": [EMBEDDING_REQUEST]})
    endpoint, discriminator = NATIVE_EMBEDDINGS, "sentences"
    example = {"sentences": ["What is hybrid search?"]}
    aliases = {
        **EmbeddingFields.aliases,
        **dict.fromkeys((*_TEXT_ALIASES, "passages", "query"), "sentences"),
    }


# Bounded so that a mean of scores stays finite.
Weight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class RerankWeights(RequestModel):
    """The weights of bge-m3's scores in late interaction."""

    example = {"dense": 1, "sparse": 0.5, "colbert": 1}

    dense: Weight = 1.0
    sparse: Weight = 1.0
    colbert: Weight = 1.0


class RerankBody(RequestModel):
    """A query and the passages to rank for it."""

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
    passages: Annotated[TextsOrImages, Field(json_schema_extra=_NOT_EMPTY)]
    """The texts to score, or pictures if the model reads them: `{"image": "data:..."}`."""
    normalize: bool = False
    """Apply the sigmoid to the logits of bge-reranker; other scores do not change."""
    instruction: str | None = None
    """The task, for rerankers that read one, such as Qwen3-Reranker and ctxl-rerank-v2."""
    weights: RerankWeights | None = None
    """The weights of late interaction; equal by default."""
    truncate: Truncate = True
    truncation_side: TruncationSide = "right"
    if_vector_space: str | None = None
    """An id from an earlier response: 412 if these scores are of another model."""
    model: ModelName = None


class ExtractBody(RequestModel):
    """Texts in which to find spans."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [EXTRACT_REQUEST]}, use_attribute_docstrings=True
    )
    endpoint = EXTRACT
    example = EXTRACT_REQUEST
    aliases = (
        dict.fromkeys((*_TEXT_ALIASES, "sentences"), "texts")
        | dict.fromkeys(("entities", "entity_types"), "labels")
        | {"aggregation_strategy": "aggregation", "min_score": "threshold"}
    )

    texts: Annotated[Texts, Field(json_schema_extra=_NOT_EMPTY)]
    """The texts to read, whole: long ones in windows that overlap."""
    labels: Annotated[list[str] | None, FailFast()] = None
    """Only return spans with these labels; required for GLiNER2, which reads them."""
    threshold: Annotated[float | None, Field(ge=0, le=1)] = None
    """Only return spans with at least this score; by default 0, and 0.5 for GLiNER2."""
    aggregation: Aggregation | None = None
    """How tokens become spans, as in transformers' pipeline; by default simple. Not for GLiNER2."""
    if_vector_space: str | None = None
    """An id from an earlier response: 412 if these scores are of another model."""
    model: ModelName = None


def check_texts(
    texts: Sequence[object], field: str, max_texts: int, setting: str = "MAX_SENTENCES_PER_REQUEST"
) -> None:
    """Raise `EmptyInputError` for no texts, and `InvalidRequestError` for more than `max_texts`."""
    if not texts:
        raise EmptyInputError(f"the list {field} is empty: send at least one text")
    if len(texts) > max_texts:
        raise InvalidRequestError(
            f"the list {field} holds {len(texts)} texts, and at most {max_texts} are allowed "
            f"({setting}): send them in several requests"
        )


def check_passages(query: str, passages: Sequence[object], field: str, settings: Settings) -> None:
    """Check passages as `check_texts` does; raise `EmptyInputError` for a blank query, too."""
    if not query.strip():
        raise EmptyInputError("the query is blank: send the text to compare the passages with")
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

    Raises nothing if reranking is disabled; the engine has an error for that.
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
            f"the option instruction has no effect with the reranker {name}, which reads no "
            "instruction: leave it out"
        )
