"""The state of a model as clients and operators see it."""

from dataclasses import dataclass
from enum import Enum

from app.engine.loaded_models import LoadedModels, ModelInfo
from app.settings import LATE_INTERACTION, NO_RERANKER, Settings
from app.settings.model_names import public_name


class ModelState(Enum):
    """The state of a model; loading a `FAILED` one is tried again after a pause."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of one model.

    `requests` is how many use it or wait for it. `load_seconds` is the duration of its latest
    loading, `reason` is why that failed, and `info` describes the model while it is loaded.
    """

    name: str
    task: str
    state: ModelState
    pinned: bool
    requests: int | None = None
    load_seconds: float | None = None
    reason: str | None = None
    info: ModelInfo | None = None


def default_statuses(
    settings: Settings, models: LoadedModels | None, *, has_failed: bool
) -> list[ModelStatus]:
    """The statuses of the default models, which are never unloaded."""
    state = ModelState.LOADING if models is None else ModelState.READY
    if has_failed:
        state = ModelState.FAILED
    names = {settings.embedding_model: "embed", settings.dense_model: "embed"}
    if settings.reranker_model not in {LATE_INTERACTION, NO_RERANKER}:
        names |= {settings.reranker_model: "rerank"}
    infos = {} if models is None else {info.name: info for info in models.infos}
    return [
        ModelStatus(public, task, state, pinned=True, info=infos.get(public))
        for name, task in names.items()
        for public in [public_name(name)]
    ]
