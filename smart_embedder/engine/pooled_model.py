"""A model of MODELS: its state, its leases, and how long it takes to load; and what /health shows.

Nothing here loads or waits: `model_pool` does.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast, get_args

from smart_embedder import errors
from smart_embedder.engine.checks import has_prompt_for
from smart_embedder.engine.model import (
    Embedder,
    LoadedModels,
    Model,
    ModelInfo,
    PlacedModels,
    Reranker,
)
from smart_embedder.engine.records import InputType
from smart_embedder.settings import LATE_INTERACTION, NO_RERANKER, Settings
from smart_embedder.settings.types import ModelEntry, public_name

# Seconds until a model that could not be loaded is tried again.
_PAUSE_AFTER_FAILURE = 30.0
# The same where other programs hold its memory, which they may leave at any time.
_PAUSE_FOR_MEMORY = 10.0
# The expected seconds of loading a model of unknown size.
_UNKNOWN_TIME = 10.0
# Seconds after the time of Retry-After for which a model is kept.
_GRACE = 1.0
# A model serves for so many seconds at least, and so many times its loading time, before it gives
# way to another one: two models that are always in demand should not spend their time on loading.
_LEAST_TURN = 2.0
_TIMES_LOADING = 4


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

    @property
    def origin(self) -> dict[str, Any]:
        """The space and the precision of each kind that it makes; None while it is not loaded."""
        if self.info is None:
            return {"vector_space": None, "precision": None}
        spaces = self.info.vector_space
        return {"vector_space": spaces, "precision": dict.fromkeys(spaces, self.info.precision)}


def abilities_of(model: Model, task: str) -> ModelAbilities:
    """Those of a model whose task is to embed or to rerank."""
    types: tuple[str, ...] = ()
    if task == "embed":
        embedder = cast(Embedder, model)
        kinds = [kind for kind in ("dense", "sparse", "colbert") if getattr(embedder.kinds, kind)]
        types = tuple(each for each in get_args(InputType) if has_prompt_for(embedder, each))
    else:
        kinds = [] if cast(Reranker, model).refusal else ["scores"]
        kinds += ["labels"] if len(getattr(model, "labels", ())) > 1 else []
    return ModelAbilities(tuple(kinds), types, model.max_length)


def default_statuses(
    settings: Settings, models: LoadedModels | None, *, has_failed: bool = False
) -> list[ModelStatus]:
    """The statuses of the default models, which are never unloaded."""
    state = ModelState.LOADING if models is None else ModelState.READY
    if has_failed:
        state = ModelState.FAILED
    tasks = {settings.embedding_model: "embed", settings.dense_model: "embed"}
    if settings.reranker_model not in {LATE_INTERACTION, NO_RERANKER}:
        tasks |= {settings.reranker_model: "rerank"}
    # By their tasks, too: an embedder and a reranker may have one name.
    loaded: dict[tuple[str, str], Model] = {}
    infos: dict[Model, ModelInfo] = {}
    if models is not None:
        infos = dict(zip(models.each, models.infos, strict=False))
        for each in models.each:
            loaded[each.name, "rerank" if each is models.reranker else "embed"] = each
    statuses = []
    for location, task in tasks.items():
        status = ModelStatus(public_name(location), task, state, pinned=True)
        if (model := loaded.get((status.name, task))) is not None:
            status = replace(status, info=infos.get(model), makes=abilities_of(model, task))
        statuses.append(status)
    return statuses


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model; to be used in the event loop's thread only.

    `leases` counts the requests that use it or wait for it, and `users` those that use it. Until
    `promised_until` a request may come that was told to come again. One that `gives_way` is to be
    unloaded, for another model, as soon as no request uses it. `needs` are the bytes that it takes
    of each memory, empty until they are known. While it is loaded, `models` are what its requests
    use, itself among them. The result of `loading` is the error, if it fails; it `began` when its
    turn came. `replaced` counts the loadings that found other files than the one before.
    """

    entry: ModelEntry
    leases: int = 0
    users: int = 0
    promised_until: float = 0.0
    gives_way: bool = False
    last_used: float = 0.0
    needs: Mapping[str, int] = field(default_factory=dict)
    models: LoadedModels | None = None
    loading: "asyncio.Task[errors.SmartEmbedderError | None] | None" = None
    load_seconds: float | None = None
    began: float | None = None
    _loaded_at: float = 0.0
    _failed_at: float = 0.0
    _failure: errors.UnavailableError | None = None
    _files: str | None = None
    replaced: int = 0

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.entry.public_name

    @property
    def loaded(self) -> Embedder | Reranker | None:
        """The model of its jobs, while it is loaded."""
        if self.models is None:
            return None
        return self.models.embedder if self.entry.task == "embed" else self.models.reranker

    @property
    def state(self) -> ModelState:
        """Where it stands."""
        if self.models is not None:
            return ModelState.READY
        if self.loading is not None:
            return ModelState.LOADING
        if isinstance(self._failure, errors.MemoryTakenError):
            return ModelState.UNLOADED if self.refusal is None else ModelState.LOADING
        return ModelState.UNLOADED if self._failure is None else ModelState.FAILED

    @property
    def is_held(self) -> bool:
        """Whether a request has it, waits for it, or was told to come back for it."""
        if self.gives_way:
            return self.users > 0
        return self.leases > 0 or time.perf_counter() < self.promised_until

    @property
    def is_awaited(self) -> bool:
        """Whether a request that has waited for its loading is about to have it."""
        return self.leases > self.users and self.loading is None

    @property
    def nbytes(self) -> int:
        """The bytes that it takes of all memories together."""
        return sum(self.needs.values())

    def promise(self, seconds: float) -> None:
        """A request was told to come again after so many seconds: keep the model for it."""
        self.promised_until = time.perf_counter() + seconds + _GRACE

    def begin(self) -> None:
        """Loading begins, or there is room for it now: the wait for room is not counted."""
        self.began = time.perf_counter()

    def has_other_files(self, files: str) -> bool:
        """Note what it was loaded from; whether that was replaced since it was loaded before."""
        before, self._files = self._files, files
        is_replaced = before is not None and before != files
        self.replaced += is_replaced
        return is_replaced

    def succeed(self, models: LoadedModels) -> float:
        """Loading has succeeded; return the seconds that it took."""
        self.models, self._failure = models, None
        self.last_used = self._loaded_at = time.perf_counter()
        self.load_seconds = self._loaded_at - (self.began or self._loaded_at)
        return self.load_seconds

    def fail(self, of_memory: errors.ModelTooLargeError | errors.MemoryTakenError | None) -> None:
        """Loading has failed: refuse requests until a pause is over."""
        self._failed_at = time.perf_counter()
        # The reason of any other failure may name folders of this machine.
        message = f"the model {self.name} could not be loaded; the log says why"
        self._failure = of_memory or errors.ModelNotLoadedError(message)

    def leave(self) -> Embedder | Reranker | None:
        """Become unloaded; return what was loaded."""
        loaded = self.loaded
        self.models, self.gives_way = None, False
        return loaded

    def turn_left(self, longest: float) -> float:
        """Seconds until it gives way to another model; it serves at most `longest` seconds."""
        turn = max(_LEAST_TURN, _TIMES_LOADING * (self.load_seconds or 0.0))
        return self._loaded_at + min(turn, longest) - time.perf_counter()

    @property
    def refusal(self) -> errors.UnavailableError | None:
        """The error of requests during the pause after a failure; None at other times."""
        is_taken = isinstance(self._failure, errors.MemoryTakenError)
        pause = _PAUSE_FOR_MEMORY if is_taken else _PAUSE_AFTER_FAILURE
        left = math.ceil(self._failed_at + pause - time.perf_counter())
        if self._failure is None or left <= 0:
            return None
        # Waiting alone makes no room.
        seconds = None if isinstance(self._failure, errors.ModelTooLargeError) else left
        return type(self._failure)(str(self._failure), retry_after=seconds)

    @property
    def is_measured(self) -> bool:
        """Whether the time of its loading can be estimated."""
        return bool(self.load_seconds or self.nbytes)

    def seconds_left(self, bytes_per_second: float) -> float:
        """Seconds that its loading still takes once it begins; at least 1."""
        expected = self.load_seconds or self.nbytes / bytes_per_second or _UNKNOWN_TIME
        elapsed = 0.0 if self.began is None else time.perf_counter() - self.began
        # Loading that takes longer than expected is expected to take half as long again.
        return max(1.0, expected - elapsed, elapsed / 2 if elapsed > expected else 0.0)

    @property
    def status(self) -> ModelStatus:
        """The state, as /health shows it."""
        models, loaded = self.models, self.loaded
        is_refused = models is None and self._failure is not None
        return ModelStatus(
            self.name,
            self.entry.task,
            self.state,
            pinned=self.entry.pinned,
            requests=self.leases,
            load_seconds=self.load_seconds,
            reason=str(self._failure) if is_refused else None,
            files_replaced=self.replaced,
            info=models.infos[-1] if models else None,
            makes=abilities_of(loaded, self.entry.task) if loaded else None,
        )


def models_with(
    placed: PlacedModels, task: str, defaults: LoadedModels, max_batch_tokens: int
) -> LoadedModels:
    """The models of its requests: an embedder alone, or a reranker beside the default models."""
    first, info = placed.models[0], placed.describe()
    if task == "rerank":
        infos = (*defaults.infos, info)
        reranker = cast(Reranker, first.model)
        return replace(
            defaults,
            reranker=reranker,
            late_interaction=False,
            infos=infos,
            max_batch_tokens=max_batch_tokens,
        )
    return LoadedModels(
        embedder=cast(Embedder, first.model),
        device=first.device,
        max_batch_tokens=max_batch_tokens,
        infos=(info,),
    )
