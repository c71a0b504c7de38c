"""The bodies of OpenAI's embeddings API, with the fields that other servers add."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from app.api.dialects.fields import AnyCase, TextsOrText
from app.api.response_schemas import SparseIndices, TruncationWarning, Usage
from app.api.schemas import PROMPT_SCHEMA, ForeignRequest
from app.engine import TruncationOptions
from app.engine.options import InputType, Side
from app.errors import InvalidRequestError
from app.vectors.muvera import MuveraSide
from app.vectors.pooling import MAX_POOL_FACTOR
from app.vectors.quantization import OutputDtype

_EXAMPLE: dict[str, JsonValue] = {"input": ["What is hybrid search?"]}
# Input types by their names in servers and clients; Jina calls the field `task`.
INPUT_TYPES: Mapping[str, InputType] = {
    "query": "query",
    "document": "document",
    "passage": "document",
    "search_query": "query",
    "search_document": "document",
    "retrieval.query": "query",
    "retrieval.passage": "document",
}
# Fields that other servers read and this one refuses, but for these values, which change nothing.
_REFUSED: Mapping[str, tuple[JsonValue, ...]] = {
    "truncate_prompt_tokens": (-1,),
    "late_chunking": (False,),
    "return_multivector": (False,),
    "add_special_tokens": (True,),
    "endianness": ("little", "native"),
    "embed_dtype": ("float32",),
}

Encoding = Literal["float", "base64"]
NumberType = Literal["float", "int8", "uint8", "binary", "ubinary"]
EmbeddingType = Encoding | NumberType
_NUMBER_TYPES = get_args(NumberType)
_Refused = Annotated[JsonValue, Field(description="Refused.")]


class OpenAIEmbeddingRequest(ForeignRequest):
    """Texts to embed."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    example = _EXAMPLE

    input: TextsOrText
    model: Annotated[
        str | None, Field(description="Any name of an embedding model; see /v1/models.")
    ] = None
    encoding_format: Annotated[
        Encoding | None,
        Field(description="base64 is of little-endian float32; the official clients ask for it."),
    ] = None
    embedding_type: Annotated[
        EmbeddingType | list[EmbeddingType] | None,
        Field(description="Jina's name for it, and for `output_dtype`."),
    ] = None
    output_dtype: Annotated[
        NumberType | None, Field(description="Fewer bits; as in /embeddings/.")
    ] = None
    dimensions: Annotated[int | None, Field(ge=1, description="Fewer, if the model can.")] = None
    output_dimension: Annotated[int | None, Field(ge=1, description="The same.")] = None
    input_type: Annotated[
        str | None, Field(description="query or document, for models with a prompt for it.")
    ] = None
    task: Annotated[
        str | None, Field(description="Jina's: retrieval.query or retrieval.passage.")
    ] = None
    prompt: Annotated[
        str | None, Field(description="Read before each text.", json_schema_extra=PROMPT_SCHEMA)
    ] = None
    prompt_name: Annotated[
        str | None,
        Field(description="A prompt of the model's sentence-transformers configuration."),
    ] = None
    truncate: Annotated[
        bool | Literal["NONE", "START", "END"] | None,
        AnyCase(str.upper),
        Field(description="Cut texts that are too long, as by default; false: an error."),
    ] = None
    truncation: Annotated[bool | None, Field(description="Voyage's name for it.")] = None
    truncation_side: Annotated[
        Side | None, Field(description="Where texts are cut; left: the beginning.")
    ] = None
    normalize: Annotated[bool | None, Field(description="To unit length, as by default.")] = None
    normalized: Annotated[bool | None, Field(description="Jina's name for it.")] = None
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
    truncate_prompt_tokens: _Refused = None
    late_chunking: _Refused = None
    return_multivector: _Refused = None
    add_special_tokens: _Refused = None
    endianness: _Refused = None
    embed_dtype: _Refused = None

    def value_of(self, *names: str) -> Any:
        """The value of a field with several names; raises `InvalidRequestError` for two values."""
        values = [value for name in names if (value := getattr(self, name)) is not None]
        if any(value != values[0] for value in values):
            raise InvalidRequestError(
                f"the fields {' and '.join(names)} mean the same and differ: send one of them"
            )
        return values[0] if values else None

    def check(self) -> None:
        """Raise `InvalidRequestError` for other servers' options that would change the vectors."""
        for name, harmless in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(f"the field {name} is not read here: leave it out")

    @property
    def as_base64(self) -> bool:
        """Whether vectors are wanted in base64."""
        if {self.encoding_format, self._type} == {"float", "base64"}:
            raise InvalidRequestError(
                "the fields encoding_format and embedding_type differ: send one of them"
            )
        return "base64" in {self.encoding_format, self._type}

    @property
    def dtype(self) -> OutputDtype:
        """The number type of dense and ColBERT vectors."""
        kind = self._type if self._type in _NUMBER_TYPES else None
        if kind is not None and self.output_dtype not in {None, kind}:
            raise InvalidRequestError(
                "the fields embedding_type and output_dtype differ: send one of them"
            )
        name: Any = kind or self.output_dtype or "float"
        return "float32" if name == "float" else name

    @property
    def _type(self) -> EmbeddingType | None:
        kinds = self.embedding_type
        if not isinstance(kinds, list):
            return kinds
        if len(set(kinds)) > 1:
            raise InvalidRequestError("the field embedding_type names several types: send one")
        return kinds[0] if kinds else None

    @property
    def truncation_options(self) -> TruncationOptions:
        """How texts are cut."""
        how, side = self.value_of("truncate", "truncation"), self.truncation_side
        sides: Mapping[Any, Side] = {"START": "left", "END": "right"}
        if side is not None and sides.get(how, side) != side:
            raise InvalidRequestError("the fields truncate and truncation_side differ: send one")
        truncate = how not in {False, "NONE"}
        return TruncationOptions(truncate, sides.get(how, side or "right"))

    @property
    def known_input_type(self) -> InputType | None:
        """Whether the texts are queries or documents."""
        known: set[InputType] = set()
        for name, value in (("input_type", self.input_type), ("task", self.task)):
            if value is not None and value not in INPUT_TYPES:
                raise InvalidRequestError(
                    f"the field {name} is unknown: send {' or '.join(INPUT_TYPES)}"
                )
            known |= {INPUT_TYPES[value]} if value is not None else set()
        if len(known) > 1:
            raise InvalidRequestError("the fields input_type and task differ: send one of them")
        return next(iter(known), None)


class OpenAIEmbedding(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[
        list[float] | str, Field(description="Of unit length; a string with base64.")
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
    """OpenAI's shape of an error, and text-embeddings-inference's on the same path."""

    error: OpenAIErrorDetails
    message: str
    type: str
    code: str
