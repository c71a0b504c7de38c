"""The responses of /health, /stats and /, for the API's description only."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.engine.loaded_models import ModelInfo
from app.engine.model_pool.model_state import ModelAbilities


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
    """How much of a model's files is on the disk, in bytes."""

    model: str
    done: int
    total: int
    percent: int


class ServedModelStatus(BaseModel):
    """Whether a model is loaded, and why not; a fact that is not known is null."""

    name: str
    task: Literal["embed", "rerank"]
    state: Literal["unloaded", "loading", "ready", "failed"]
    pinned: Annotated[bool, Field(description="Never unloaded, as the default models.")]
    requests: Annotated[int | None, Field(description="That use it or wait for it.")]
    load_seconds: Annotated[float | None, Field(description="Of the latest loading.")]
    reason: Annotated[str | None, Field(description="Why one that failed or waits is not there.")]
    files_replaced: Annotated[
        int | None,
        Field(description="How often it was loaded from other files than the time before."),
    ]
    info: Annotated[ModelInfo | None, Field(description="How it is computed, while it is loaded.")]
    makes: Annotated[ModelAbilities | None, Field(description="What, while it is loaded.")]
    token_budgets: Annotated[
        dict[str, int], Field(description="Tokens of a forward on each device, while it is loaded.")
    ]


class HealthResponse(BaseModel):
    """Whether the service can answer, and with what; what is not known yet is null."""

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
    demo: Annotated[str | None, Field(description="For a demo model: what it is not for.")]
    max_input_length: int
    batch_size: int | None
    max_requests_in_batch: int | None
    max_batch_tokens: int | None
    dtype: str | None
    attention: str | None


class LivenessResponse(BaseModel):
    """Whether a restart is needed."""

    status: Literal["alive", "unhealthy"]
    reason: str | None = None


class IndexResponse(BaseModel):
    """What answers here."""

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
