"""Schemas of the responses, only for /openapi.json; responses are rendered without them."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from smart_embedder.interface import ModelAbilities, ModelInfo
from smart_embedder.results import PartScores, Span
from smart_embedder.vectors import OutputDtype


class SparseIndices(BaseModel):
    """Sparse weights as Qdrant's SparseVector takes them."""

    indices: list[int]
    values: list[float]


class TokenStrings(BaseModel):
    """Strings of the vocabulary, aligned with `sparse` and `colbert`; null if those are null."""

    sparse: dict[str, str] | None
    colbert: list[str] | None


class IndexedTokenStrings(BaseModel):
    """The same, with `sparse_as_indices`."""

    sparse: list[str]
    colbert: list[str] | None


class DenseAndColbert(BaseModel):
    """The vectors of one text; a kind that was not requested is null."""

    dense: list[float] | None
    dense_scale: Annotated[float | None, Field(description="With int8 and uint8 only.")] = None
    colbert: list[list[float]] | None
    colbert_scale: Annotated[
        list[float] | None, Field(description="One for each vector; with int8 and uint8 only.")
    ] = None
    muvera: Annotated[list[float] | None, Field(description="With muvera only.")] = None


class Embeddings(DenseAndColbert):
    """The vectors of one text; a kind that was not requested is null."""

    sparse: Annotated[dict[str, float] | None, Field(description="Weights by token id.")]


class IndexedEmbeddings(DenseAndColbert):
    """The same, with `sparse_as_indices`."""

    sparse: SparseIndices


class Base64Array(BaseModel):
    """An array as raw bytes."""

    dtype: str
    shape: list[int]
    data: Annotated[str, Field(description="Little-endian, row by row.")]


class Base64Sparse(BaseModel):
    """Sparse weights as two arrays."""

    indices: Base64Array
    values: Base64Array


class Base64Embeddings(BaseModel):
    """The same, with `encoding` base64."""

    dense: Base64Array | None
    dense_scale: float | None = None
    sparse: Base64Sparse | None
    colbert: Base64Array | None
    colbert_scale: list[float] | None = None
    muvera: Base64Array | None = None


class EmbeddedSentence(BaseModel):
    """One text and its vectors."""

    id: Annotated[int, Field(description="Position in the request.")]
    text: str
    embeddings: Embeddings | IndexedEmbeddings
    tokens: Annotated[
        TokenStrings | IndexedTokenStrings | None, Field(description="With return_tokens only.")
    ] = None


class Base64Sentence(BaseModel):
    """The same, with `encoding` base64."""

    id: int
    text: str
    embeddings: Base64Embeddings
    tokens: TokenStrings | IndexedTokenStrings | None = None


class WarningTarget(BaseModel):
    """The text that a warning is about."""

    field: str
    index: int
    pointer: Annotated[str, Field(description="JSON pointer into the request.")]


class TruncationDetails(BaseModel):
    """How much was cut."""

    model: str
    max_tokens: int
    original_tokens: int
    truncated_tokens: int
    truncation_side: Literal["start", "end"]
    lower_bound: Annotated[
        bool | None, Field(description="True if the text was cut before it was tokenized.")
    ] = None


class TruncationWarning(BaseModel):
    """A text was longer than a model reads, or (without `details`) it had lone surrogates."""

    code: str
    severity: Literal["warning"]
    message: str
    target: WarningTarget
    details: TruncationDetails | None = None


class Usage(BaseModel):
    """Tokens that the models read."""

    prompt_tokens: int
    total_tokens: int


class TimingsMs(BaseModel):
    """Milliseconds in each stage."""

    tokenize: float
    queue: float
    inference: float
    total: float


Sentence = TypeVar("Sentence", EmbeddedSentence, Base64Sentence)


class VectorKinds(BaseModel):
    """One string for each kind of vectors; null for a kind that is not in the response."""

    dense: str | None
    sparse: str | None
    colbert: str | None


class EmbeddingReport(BaseModel, Generic[Sentence]):
    """Vectors for each text, in the order of the request, and a report."""

    data: list[Sentence]
    model_name: str
    dense_model_name: str
    sparse_model_name: str
    colbert_model_name: str
    vector_space: Annotated[VectorKinds, Field(description="The id of each kind's space.")]
    processing_time_ms: float
    warnings: list[TruncationWarning]
    usage: Usage
    timings_ms: TimingsMs
    output_dtype: Annotated[
        OutputDtype | None, Field(description="Only if it is not plain float32.")
    ] = None


class EmbeddingResponse(EmbeddingReport[EmbeddedSentence]):
    """Vectors for each text, in the order of the request."""


class Base64Response(EmbeddingReport[Base64Sentence]):
    """The same, with `encoding` base64."""


class RankedPassage(BaseModel):
    """One passage and its score."""

    index: Annotated[int, Field(description="Position in the request.")]
    passage: str
    score: float
    parts: Annotated[PartScores | None, Field(description="Late interaction only.")] = None


class RerankResponse(BaseModel):
    """The passages by falling score."""

    results: list[RankedPassage]
    model_name: str
    vector_space: Annotated[
        dict[str, str],
        Field(description="The id for `score`, or in late interaction for each kind of vectors."),
    ]
    processing_time_ms: float
    warnings: list[TruncationWarning]
    usage: Usage
    timings_ms: TimingsMs


class TextSpans(BaseModel):
    """The spans of one text, in their order in it."""

    id: Annotated[int, Field(description="Position in the request.")]
    spans: list[Span]


class ExtractResponse(BaseModel):
    """The spans of each text, in the order of the request, and a report."""

    data: list[TextSpans]
    model_name: str
    vector_space: Annotated[dict[str, str], Field(description="The id for `score`.")]
    processing_time_ms: float
    warnings: list[TruncationWarning]
    usage: Usage
    timings_ms: TimingsMs


class ErrorResponse(BaseModel):
    """The shape of every error."""

    detail: Annotated[str, Field(description="A sentence.")]
    code: Annotated[str, Field(description="A stable word for programs.")]
    request_id: str
    errors: Annotated[
        list[dict[str, Any]] | None, Field(description="For 422: the pointer and message of each.")
    ] = None


class Gpu(BaseModel):
    """The hardware in use."""

    available: bool
    device_info: str | None
    memory_gb: float | None
    device_count: int
    multi_gpu_enabled: bool
    configured_devices: list[str]
    failed_devices: Annotated[list[str], Field(description="Out of service until a restart.")]


class DownloadProgress(BaseModel):
    """How much of a model's files has been downloaded, in bytes."""

    model: str
    done: int
    total: int
    percent: int


class ServedModelStatus(BaseModel):
    """Whether a model is loaded, and if not, why; null for what is unknown."""

    name: str
    task: Literal["embed", "rerank", "extract"]
    state: Literal["unloaded", "loading", "ready", "failed"]
    pinned: Annotated[bool, Field(description="Never unloaded, as the default models.")]
    requests: Annotated[
        int | None,
        Field(description="Requests that use or await it; null for a default model."),
    ]
    load_seconds: Annotated[
        float | None,
        Field(description="Of the latest loading; null for a default model."),
    ]
    reason: Annotated[str | None, Field(description="Why the model failed or has to wait.")]
    files_replaced: Annotated[int, Field(description="How often it was loaded from changed files.")]
    info: Annotated[ModelInfo | None, Field(description="How it is computed, while it is loaded.")]
    makes: Annotated[ModelAbilities | None, Field(description="Its results, while it is loaded.")]
    token_budgets: Annotated[
        dict[str, int], Field(description="Tokens of a forward, by device, while it is loaded.")
    ]


class HealthResponse(BaseModel):
    """Whether the service is ready, and its models and limits; null for what is unknown."""

    status: Literal["healthy", "loading", "draining", "unhealthy"]
    reason: str | None
    download: Annotated[
        DownloadProgress | None, Field(description="While a model is being downloaded.")
    ]
    version: str
    gpu: Gpu
    model: str
    dense_embedding_model: str
    reranker_model: str
    models: Annotated[list[ModelInfo], Field(description="How each default model is computed.")]
    served_models: Annotated[
        list[ServedModelStatus], Field(description="The default models, and then those of MODELS.")
    ]
    demo: Annotated[str | None, Field(description="A warning about the demo model.")]
    max_input_length: Annotated[
        int, Field(description="How many tokens of a text the embedding model reads at most.")
    ]
    batch_size: Annotated[
        int | None,
        Field(
            description="How many texts of max_input_length tokens share a forward: "
            "max_batch_tokens // max_input_length, and at least 1. More shorter texts fit."
        ),
    ]
    max_requests_in_batch: Annotated[
        int | None, Field(description="MAX_REQUESTS_IN_BATCH; null if there is no such limit.")
    ]
    max_batch_tokens: Annotated[
        int | None, Field(description="How many tokens one forward of the embedding model takes.")
    ]
    dtype: str | None
    attention: str | None


class LivenessResponse(BaseModel):
    """Whether the process must be restarted."""

    status: Literal["alive", "unhealthy"]
    reason: str | None = None


class IndexResponse(BaseModel):
    """The service and its main paths."""

    service: str
    version: str
    paths: dict[str, str]


class StatsResponse(BaseModel):
    """Totals since the start."""

    uptime: str
    uptime_seconds: int
    total_requests: int
    total_sentences: int
    total_batches: int
    rejected_requests: int
    hardware: Gpu
