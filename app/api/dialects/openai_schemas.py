"""The bodies of OpenAI's embeddings API, with the fields that other servers add."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from app.api.dialects.fields import (
    DTYPES,
    TASKS,
    EmbeddingType,
    EmbeddingTypes,
    NumberType,
    Refused,
    Task,
    TextsOrObjects,
    Truncate,
    Truncation,
    TruncationSide,
    truncation_of,
    unless,
    value_of,
)
from app.api.response_schemas import SparseIndices, TruncationWarning, Usage
from app.api.schemas import PROMPT_SCHEMA, ForeignRequest
from app.engine import TruncationOptions
from app.errors import InvalidRequestError
from app.vectors.muvera import MuveraSide
from app.vectors.pooling import MAX_POOL_FACTOR
from app.vectors.quantization import OutputDtype

_EXAMPLE: dict[str, JsonValue] = {"input": ["What is hybrid search?"]}


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How vectors are written: as `dtype`, or, with `types`, as an object with each of these."""

    dtype: OutputDtype
    as_base64: bool
    types: tuple[EmbeddingType, ...] = ()


def _different() -> InvalidRequestError:
    return InvalidRequestError(
        "the fields encoding_format, embedding_type and output_dtype differ: send one of them"
    )


def _unique(types: EmbeddingType | list[EmbeddingType] | None) -> tuple[EmbeddingType, ...]:
    listed = types if isinstance(types, list) else [types]
    return tuple(dict.fromkeys(each for each in listed if each is not None))


class OpenAIEmbeddingRequest(ForeignRequest):
    """Texts to embed."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    example = _EXAMPLE
    aliases = dict.fromkeys(("inputs", "texts", "text", "sentences"), "input")

    input: TextsOrObjects
    model: Annotated[
        str | None, Field(description="Any name of an embedding model; see /v1/models.")
    ] = None
    encoding_format: Annotated[
        EmbeddingType | EmbeddingTypes | None,
        Field(description="base64 is of little-endian float32; the official clients ask for it."),
    ] = None
    embedding_type: Annotated[
        EmbeddingType | EmbeddingTypes | None,
        Field(description="Jina's name for it, and for `output_dtype`; several: an object."),
    ] = None
    output_dtype: Annotated[
        NumberType | None, Field(description="Fewer bits; as in /embeddings/.")
    ] = None
    dimensions: Annotated[int | None, Field(ge=1, description="Fewer, if the model can.")] = None
    output_dimension: Annotated[int | None, Field(ge=1, description="The same.")] = None
    dimensionality: Annotated[int | None, Field(ge=1, description="The same.")] = None
    input_type: Annotated[
        str | None,
        Field(
            description="What the texts are for: query, document, classification and others; the "
            "model's prompt for it is read, if it has one."
        ),
    ] = None
    task: Annotated[str | None, Field(description="Jina's name for it.")] = None
    task_type: Annotated[str | None, Field(description="Nomic's name for it.")] = None
    prompt: Annotated[
        str | None, Field(description="Read before each text.", json_schema_extra=PROMPT_SCHEMA)
    ] = None
    prompt_name: Annotated[
        str | None,
        Field(description="A prompt of the model's sentence-transformers configuration."),
    ] = None
    truncate: Truncate = None
    truncation: Truncation = None
    truncation_strategy: Annotated[Truncate, Field(description="Mixedbread's name for it.")] = None
    truncation_side: TruncationSide = None
    normalize: Annotated[bool | None, Field(description="To unit length, as by default.")] = None
    normalized: Annotated[bool | None, Field(description="Jina's name for it.")] = None
    use_activation: Annotated[bool | None, Field(description="vLLM's name for it.")] = None
    return_sparse: Annotated[
        bool | None, Field(description="Lexical weights, too: an extension.")
    ] = None
    return_colbert: Annotated[
        bool | None, Field(description="One vector for each token, too: an extension.")
    ] = None
    colbert_pool_factor: Annotated[
        int | None, Field(ge=2, le=MAX_POOL_FACTOR, description="As in /embeddings/: an extension.")
    ] = None
    muvera: Annotated[MuveraSide | None, Field(description="As in /embeddings/: an extension.")] = (
        None
    )
    # vLLM's.
    truncate_prompt_tokens: Annotated[Refused, unless(-1)] = None
    add_special_tokens: Annotated[Refused, unless(True)] = None
    padding: Annotated[Refused, unless("do_not_pad")] = None
    embed_dtype: Annotated[Refused, unless("float32")] = None
    endianness: Annotated[Refused, unless("little", "native")] = None
    messages: Annotated[Refused, unless()] = None
    # Jina's.
    late_chunking: Annotated[Refused, unless(False)] = None
    return_multivector: Annotated[Refused, unless(False)] = None
    # NVIDIA's.
    modality: Annotated[Refused, unless("text")] = None
    # Nomic's.
    long_text_mode: Annotated[Refused, unless("truncate")] = None
    max_tokens_per_text: Annotated[Refused, unless()] = None
    # What several name the task in words, which models read as a prompt.
    instruction: Annotated[Refused, unless()] = None

    @property
    def form(self) -> VectorForm:
        """How vectors are written; raises `InvalidRequestError` for fields that differ."""
        formats, types = _unique(self.encoding_format), _unique(self.embedding_type)
        if len(formats) > 1 or len(types) > 1:
            return self._form_of_several(formats, types)
        numbers = {*types, self.output_dtype} - {None, "base64"}
        # Clients send it by default, beside the type that they want.
        if formats != ("float",):
            numbers |= {*formats} - {"base64"}
        as_base64 = "base64" in {*formats, *types}
        if len(numbers) > 1 or {"float", "base64"} == {*formats, *types}:
            raise _different()
        kind: Any = next(iter(numbers), "float")
        return VectorForm(DTYPES[kind], as_base64=as_base64)

    def _form_of_several(
        self, formats: tuple[EmbeddingType, ...], types: tuple[EmbeddingType, ...]
    ) -> VectorForm:
        several, other = (formats, types) if len(formats) > 1 else (types, formats)
        if self.output_dtype is not None or other not in {(), ("float",), ("base64",)}:
            raise _different()
        if self.return_colbert:
            raise InvalidRequestError(
                "the fields return_colbert and embedding_type exclude each other where that names "
                "several types: send one type"
            )
        return VectorForm("float32", as_base64="base64" in other, types=several)

    @property
    def truncation_options(self) -> TruncationOptions:
        """How texts are cut."""
        how = value_of(self, "truncate", "truncation", "truncation_strategy")
        return truncation_of(how, self.truncation_side)

    @property
    def known_task(self) -> Task:
        """What the texts are for; raises `InvalidRequestError` for an unknown value, or for two."""
        tasks = []
        for name in ("input_type", "task", "task_type"):
            value = getattr(self, name)
            if value is None:
                continue
            if value not in TASKS:
                raise InvalidRequestError(
                    f"the field {name} is unknown: send {', '.join(TASKS)}, or leave it out"
                )
            tasks.append(TASKS[value])
        types = {each.input_type for each in tasks if each.input_type is not None}
        if len(types) > 1:
            raise InvalidRequestError(
                "the fields input_type, task and task_type differ: send one of them"
            )
        prompts = tuple(prompt for each in tasks for prompt in each.prompts)
        return Task(next(iter(types), None), prompts)


class OpenAIEmbedding(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str | dict[EmbeddingType, list[float] | str],
        Field(description="Of unit length; a string with base64; one of each type of several."),
    ]
    scale: Annotated[
        float | None, Field(description="Gives the vector back; with int8 and uint8 only.")
    ] = None
    sparse: SparseIndices | None = None
    colbert: list[list[float]] | None = None
    colbert_scale: list[float] | None = None
    muvera: list[float] | None = None


class OpenAIEmbeddings(BaseModel):
    """Vectors in the order of the request."""

    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: Usage
    warnings: Annotated[
        list[TruncationWarning] | None, Field(description="Only where a text was cut.")
    ] = None


class OpenAIModel(BaseModel):
    """A name by which a model can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: Annotated[Literal["embed", "rerank"], Field(description="An extension.")]
    state: Annotated[
        Literal["unloaded", "loading", "ready", "failed"],
        Field(description="Whether it is loaded: an extension."),
    ]
    token_budgets: Annotated[
        dict[str, int],
        Field(description="Tokens of a forward on each device, while it is loaded: an extension."),
    ]


class OpenAIModels(BaseModel):
    """Every name of every model."""

    object: Literal["list"]
    data: list[OpenAIModel]


class OpenAIErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(BaseModel):
    """OpenAI's shape of an error, with those of other servers on the same path."""

    error: OpenAIErrorDetails
    message: str
    type: str
    code: str
    detail: str
