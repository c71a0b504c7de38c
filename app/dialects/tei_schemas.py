"""The bodies and errors of text-embeddings-inference's API."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, FailFast, Field, JsonValue, RootModel

from app.context import RERANK, Dialect, Endpoint, ErrorFacts
from app.dialects.fields import AnyCase, TextsOrText
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
    server_error = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "Backend" if server_error else "Validation"
    return {"error": error.message, "error_type": _ERROR_TYPES.get(error.code, kind)}


TEI = Dialect("text-embeddings-inference", _error_body, _STATUSES)
_EXAMPLE: dict[str, JsonValue] = {"inputs": ["What is hybrid search?"]}
_Direction = Annotated[
    Literal["left", "right"] | None,
    AnyCase(str.lower),
    Field(description="Which end is cut, Left or Right; Right by default."),
]
_PromptName = Annotated[
    str | None, Field(description="A prompt of the model's sentence-transformers configuration.")
]


class _Reading(ForeignRequest):
    """How texts are read."""

    dialect = TEI
    aliases = dict.fromkeys(("input", "text", "sentences"), "inputs")

    truncate: bool | None = Field(
        None, description="Cut a text that is too long; else it is an error."
    )
    truncation_direction: _Direction = None

    @property
    def truncation(self) -> TruncationOptions:
        """These fields as the engine's options."""
        return TruncationOptions(bool(self.truncate), self.truncation_direction or "right")


class EmbedSparseRequest(_Reading):
    """Embed texts as sparse vectors."""

    endpoint = Endpoint("/embed_sparse")
    example = _EXAMPLE

    inputs: TextsOrText
    prompt_name: _PromptName = None

    def request(self, texts: list[str], outputs: Outputs = DENSE) -> records.EmbedRequest:
        """What is asked of the engine; `outputs` have unit length."""
        return records.EmbedRequest(
            texts,
            outputs,
            normalize_dense=True,
            truncation=self.truncation,
            prompt_name=self.prompt_name,
        )


class TeiEmbedRequest(EmbedSparseRequest):
    """Embed texts."""

    endpoint, discriminator = Endpoint("/embed"), "inputs"
    normalize: bool | None = Field(None, description="To unit length, as by default.")
    dimensions: int | None = Field(None, ge=1, description="Fewer, if the model can.")


class RerankTextsRequest(_Reading):
    """Order texts by relevance."""

    endpoint, discriminator = RERANK, "texts"
    example: ClassVar[Mapping[str, JsonValue]] = {
        "query": "What is hybrid search?",
        "texts": ["A recipe for bread.", "It joins two rankings."],
    }

    query: Annotated[str, Field(json_schema_extra={"minLength": 1, "pattern": r"\S"})]
    texts: Annotated[list[str], FailFast()]
    raw_scores: bool | None = Field(None, description="The model's own scores.")
    return_text: bool | None = Field(None, description="Repeat the texts.")


class TokenizeRequest(ForeignRequest):
    """Tokenise texts."""

    dialect, endpoint = TEI, Endpoint("/tokenize", Purpose.TOKENIZING)
    example = _EXAMPLE

    inputs: TextsOrText
    add_special_tokens: bool | None = None
    prompt_name: _PromptName = None


class DenseVectors(RootModel[list[list[float]]]):
    """One vector for each text."""


class SparseValue(BaseModel):
    """The weight of one token."""

    index: int
    value: float


class SparseVectors(RootModel[list[list[SparseValue]]]):
    """The weights of each text."""


class Rank(BaseModel):
    """One text and its score."""

    index: int
    score: float
    text: str | None = None


class Ranks(RootModel[list[Rank]]):
    """The texts by falling score."""


class Token(BaseModel):
    """One token, and the characters of the text that it stands for."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokens(RootModel[list[list[Token]]]):
    """The tokens of each text."""


class Info(BaseModel):
    """A model and the limits of its service."""

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
    """text-embeddings-inference's shape of an error."""

    error: str
    error_type: Literal[
        "Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty", "Unauthorized"
    ]
