"""Request bodies, responses and errors of the API of text-embeddings-inference 1.9."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, FailFast, Field, JsonValue, RootModel

from app.context import RERANK, Dialect, Endpoint, ErrorFacts
from app.dialects.fields import TextsOrText, fold_case
from app.schemas import ForeignRequest
from smart_embedder import requests as records
from smart_embedder.requests import DENSE, Outputs, Purpose, TruncationOptions

_ERROR_TYPES = {
    "empty_input": "Empty",
    "unauthorized": "Unauthorized",
    "rate_limited": "Overloaded",
    "queue_full": "Overloaded",
    "loading": "Unhealthy",
    "model_not_loaded": "Unhealthy",
    "model_too_large": "Unhealthy",
    "draining": "Unhealthy",
    "unhealthy": "Unhealthy",
}
_STATUSES = {
    "queue_full": 429,
    "inference_failed": 424,
    "out_of_memory": 424,
    "reranker_disabled": 424,
}


def _error_body(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    is_server_error = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    default_type = "Backend" if is_server_error else "Validation"
    return {"error": error.message, "error_type": _ERROR_TYPES.get(error.code, default_type)}


TEI = Dialect("text-embeddings-inference", _error_body, _STATUSES)
_EXAMPLE: dict[str, JsonValue] = {"inputs": ["What is hybrid search?"]}
_Direction = Annotated[
    Literal["left", "right"] | None,
    fold_case(str.lower),
    Field(description="The side at which texts are cut, Left or Right; Right by default."),
]
_PromptName = Annotated[
    str | None, Field(description="A prompt of the model's sentence-transformers configuration.")
]


class _TruncationFields(ForeignRequest):
    """The fields about truncation."""

    dialect = TEI
    aliases = dict.fromkeys(("input", "text", "sentences"), "inputs")

    truncate: bool | None = Field(
        None, description="Cut long texts, the default; false: a long text is an error."
    )
    truncation_direction: _Direction = None

    @property
    def truncation(self) -> TruncationOptions:
        """The fields as the engine's options."""
        return TruncationOptions(self.truncate is not False, self.truncation_direction or "right")


class EmbedSparseRequest(_TruncationFields):
    """Embed texts as sparse vectors."""

    endpoint = Endpoint("/embed_sparse")
    example = _EXAMPLE

    inputs: TextsOrText
    prompt_name: _PromptName = None

    def build_request(self, outputs: Outputs = DENSE) -> records.EmbedRequest:
        """Build the engine's request; dense vectors get unit length."""
        return records.EmbedRequest(
            self.inputs,
            outputs,
            normalize_dense=True,
            truncation=self.truncation,
            prompt_name=self.prompt_name,
        )


class TeiEmbedRequest(EmbedSparseRequest):
    """Embed texts."""

    endpoint, discriminator = Endpoint("/embed"), "inputs"
    normalize: bool | None = Field(None, description="Scale to unit length, the default.")
    dimensions: int | None = Field(
        None, ge=1, description="Fewer dimensions, if the model supports that."
    )


class RerankTextsRequest(_TruncationFields):
    """Order texts by relevance."""

    endpoint, discriminator = RERANK, "texts"
    example: ClassVar[Mapping[str, JsonValue]] = {
        "query": "What is hybrid search?",
        "texts": ["A recipe for bread.", "It joins two rankings."],
    }

    query: Annotated[str, Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})]
    texts: Annotated[list[str], FailFast()]
    raw_scores: bool | None = Field(None, description="Return the model's raw scores.")
    return_text: bool | None = Field(None, description="Return the texts, too.")


class TokenizeRequest(ForeignRequest):
    """Tokenize texts."""

    dialect, endpoint = TEI, Endpoint("/tokenize", Purpose.TOKENIZING)
    example = _EXAMPLE

    inputs: TextsOrText
    add_special_tokens: bool | None = None
    prompt_name: _PromptName = None


class DenseVectors(RootModel[list[list[float]]]):
    """The vector of each text."""


class SparseValue(BaseModel):
    """The weight of one token; `index` is the token's id."""

    index: int
    value: float


class SparseVectors(RootModel[list[list[SparseValue]]]):
    """The weights of each text."""


class Rank(BaseModel):
    """The score of one text; `index` is its position in the request."""

    index: int
    score: float
    text: str | None = None


class Ranks(RootModel[list[Rank]]):
    """The texts, the best first."""


class Token(BaseModel):
    """One token, and the characters of the text that it covers."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokens(RootModel[list[list[Token]]]):
    """The tokens of each text."""


class Info(BaseModel):
    """A model and the limits of the service."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    vector_space: Annotated[dict[str, str], Field(description="An extension.")]
    tokenization_workers: int
    version: str


class TeiError(BaseModel):
    """An error in text-embeddings-inference's form."""

    error: str
    error_type: Literal[
        "Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty", "Unauthorized"
    ]
