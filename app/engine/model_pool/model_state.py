"""The state of a model as clients and operators see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import get_args

from app.engine.loaded_models import LoadedModels, ModelInfo
from app.engine.model import Embedder, Reranker
from app.engine.option_checks import has_prompt_for
from app.engine.options import InputType
from app.settings import LATE_INTERACTION, NO_RERANKER, Settings
from app.settings.model_names import public_name


class ModelState(Enum):
    """The state of a model; loading a `FAILED` one is tried again after a pause."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelAbilities:
    """What a model makes of texts.

    `kinds` are those of `dense`, `sparse` and `colbert` that it makes, or of a reranker's `scores`
    and `labels`. `input_types` change how it reads a text; `max_length` are its most tokens.
    """

    kinds: tuple[str, ...]
    input_types: tuple[str, ...]
    max_length: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of one model.

    `requests` is how many use it or wait for it. `load_seconds` is the duration of its latest
    loading, and `reason` is why that failed or waits. `files_replaced` is how often it was loaded
    from other files than the time before. While the model is loaded, `info` describes how it is
    computed, `makes` what it makes, and `token_budgets` what one forward may hold on each device.
    """

    name: str
    task: str
    state: ModelState
    pinned: bool
    requests: int | None = None
    load_seconds: float | None = None
    reason: str | None = None
    files_replaced: int | None = None
    info: ModelInfo | None = None
    makes: ModelAbilities | None = None
    token_budgets: Mapping[str, int] = field(default_factory=dict)


def abilities_of(task: str, models: LoadedModels) -> ModelAbilities | None:
    """Those of the model that does the task alone; None where there is no such model."""
    if task == "embed":
        return _embedder_abilities(models.embedder)
    return None if models.reranker is None else _reranker_abilities(models.reranker)


def _embedder_abilities(model: Embedder) -> ModelAbilities:
    kinds = tuple(kind for kind in ("dense", "sparse", "colbert") if getattr(model.kinds, kind))
    types = tuple(each for each in get_args(InputType) if has_prompt_for(model, each))
    return ModelAbilities(kinds, types, model.max_length)


def _reranker_abilities(model: Reranker) -> ModelAbilities:
    scores = () if model.refusal else ("scores",)
    labels = ("labels",) if len(getattr(model, "labels", ())) > 1 else ()
    return ModelAbilities((*scores, *labels), (), model.max_length)


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
    makes = {} if models is None else _abilities_by_name(models)
    return [
        ModelStatus(
            public, task, state, pinned=True, info=infos.get(public), makes=makes.get(public)
        )
        for name, task in names.items()
        for public in [public_name(name)]
    ]


def _abilities_by_name(models: LoadedModels) -> dict[str, ModelAbilities]:
    embedders = {
        each.name: _embedder_abilities(each) for each in (models.embedder, models.dense_model)
    }
    reranker = models.reranker
    return (
        embedders
        if reranker is None
        else embedders | {reranker.name: _reranker_abilities(reranker)}
    )
