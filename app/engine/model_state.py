"""What is told of a model from outside: whether it serves, and why not."""

from dataclasses import dataclass
from enum import Enum

from app.engine.loaded_models import LoadedModels, ModelInfo
from app.settings import LATE_INTERACTION, NO_RERANKER, Settings
from app.settings.model_names import public_name


class ModelState(Enum):
    """Where a model stands; a `FAILED` one is tried again after a pause."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of one model.

    `requests` use it or wait for it, `load_seconds` is what its latest loading took, `reason` says
    why a failed one is not there, and `info` how it is computed while it is loaded.
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
    """Those of the models that have settings of their own, which are loaded for good."""
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
