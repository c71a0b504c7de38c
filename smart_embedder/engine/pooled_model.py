"""A model: its state, its leases, and how long it takes to load; and what /health shows.

Nothing here loads or waits: `model_pool` does.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import cast, get_args

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
from smart_embedder.engine.space import VECTORS
from smart_embedder.settings.engine import ModelEntry

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

    `kinds` are those of `dense`, `sparse` and `colbert` that it makes, or a reranker's `scores`.
    `input_types` change how it reads a text; `max_length` are its most tokens.
    """

    kinds: tuple[str, ...]
    input_types: tuple[str, ...]
    max_length: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of one model.

    `requests` is how many use it or wait for it, None for a default one. `load_seconds` is how long
    its latest loading took, and `reason` is why that failed or waits. `files_replaced` is how often
    it was loaded from other files than the time before. While the model is loaded, `info` describes
    how it is computed, `makes` what it makes, and `token_budgets` what one forward may hold on each
    device.
    """

    name: str
    task: str
    state: ModelState
    pinned: bool
    requests: int | None = None
    load_seconds: float | None = None
    reason: str | None = None
    files_replaced: int = 0
    info: ModelInfo | None = None
    makes: ModelAbilities | None = None
    token_budgets: Mapping[str, int] = field(default_factory=dict)


def abilities_of(model: Model, task: str) -> ModelAbilities:
    """Those of a model whose task is to embed or to rerank."""
    if task != "embed":
        return ModelAbilities(("scores",), (), model.max_length)
    embedder = cast(Embedder, model)
    kinds = tuple(kind for kind in VECTORS if getattr(embedder.kinds, kind))
    types = tuple(each for each in get_args(InputType) if has_prompt_for(embedder, each))
    return ModelAbilities(kinds, types, model.max_length)


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model; to be used in the event loop's thread only.

    One that `is_default` is loaded at the start. `leases` counts the requests that use it or wait
    for it, and `users` those that use it. Until `promised_until` a request may come that was told
    to come again. One that `gives_way` is to be unloaded, for another model, as soon as no request
    uses it. `needs` are the bytes that it takes of each memory, empty until they are known. While
    it is loaded, it is `placed`, `info` tells how it is computed, and a forward may hold
    `max_batch_tokens`. The result of `loading` is the error, if it fails; it `began` when its turn
    came. After a failure requests are refused until `paused_until`. `replaced` counts the loadings
    that found other files than the one before.
    """

    entry: ModelEntry
    is_default: bool = False
    leases: int = 0
    users: int = 0
    promised_until: float = 0.0
    gives_way: bool = False
    last_used: float = 0.0
    needs: Mapping[str, int] = field(default_factory=dict)
    placed: PlacedModels | None = None
    info: ModelInfo | None = None
    max_batch_tokens: int = 0
    loading: "asyncio.Task[errors.SmartEmbedderError | None] | None" = None
    load_seconds: float | None = None
    began: float | None = None
    _loaded_at: float = 0.0
    paused_until: float = 0.0
    _failure: errors.UnavailableError | None = None
    _files: str | None = None
    replaced: int = 0

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.entry.public_name

    @property
    def loaded(self) -> Model | None:
        """The model of its jobs, while it is loaded."""
        return None if self.placed is None else self.placed.models[0].model

    @property
    def state(self) -> ModelState:
        """Where it stands."""
        if self.placed is not None:
            return ModelState.READY
        if self.loading is not None or (self.is_default and self._failure is None):
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

    def succeed(self, placed: PlacedModels, max_batch_tokens: int) -> None:
        """Loading has succeeded."""
        self.placed, self._failure = placed, None
        self.info, self.max_batch_tokens = placed.describe(), max_batch_tokens
        self.last_used = self._loaded_at = time.perf_counter()
        if self.began is not None:
            self.load_seconds = self._loaded_at - self.began

    def fail(self, of_memory: errors.ModelTooLargeError | errors.MemoryTakenError | None) -> None:
        """Loading has failed: refuse requests until a pause is over."""
        is_taken = isinstance(of_memory, errors.MemoryTakenError)
        pause = _PAUSE_FOR_MEMORY if is_taken else _PAUSE_AFTER_FAILURE
        self.paused_until = time.perf_counter() + pause
        # The reason of any other failure may name folders of this machine.
        message = f"the model {self.name} could not be loaded; the log says why"
        self._failure = of_memory or errors.ModelNotLoadedError(message)

    def leave(self) -> Model | None:
        """Become unloaded; return what was loaded."""
        loaded = self.loaded
        self.placed, self.info, self.gives_way = None, None, False
        return loaded

    def turn_left(self, longest: float) -> float:
        """Seconds until it gives way to another model; it serves at most `longest` seconds."""
        turn = max(_LEAST_TURN, _TIMES_LOADING * (self.load_seconds or 0.0))
        return self._loaded_at + min(turn, longest) - time.perf_counter()

    @property
    def refusal(self) -> errors.UnavailableError | None:
        """The error of requests during the pause after a failure; None at other times."""
        left = math.ceil(self.paused_until - time.perf_counter())
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
        loaded = self.loaded
        is_refused = loaded is None and self._failure is not None
        return ModelStatus(
            self.name,
            self.entry.task,
            self.state,
            pinned=self.entry.pinned,
            # A request that names none has all default ones, whichever it needs.
            requests=None if self.is_default else self.leases,
            load_seconds=self.load_seconds,
            reason=str(self._failure) if is_refused else None,
            files_replaced=self.replaced,
            info=self.info,
            makes=abilities_of(loaded, self.entry.task) if loaded else None,
        )


@dataclass(eq=False)
class ModelGroup:
    """The models that work together for a request; the first fields are as in `LoadedModels`."""

    embedder: PooledModel
    dense: PooledModel | None = None
    reranker: PooledModel | None = None
    late_interaction: bool = False

    @cached_property
    def members(self) -> tuple[PooledModel, ...]:
        """Those that there are."""
        models = (self.embedder, self.dense, self.reranker)
        return tuple(model for model in models if model is not None)

    @cached_property
    def loaded(self) -> LoadedModels:
        """What requests work with, while all of them are loaded: until `forget`."""
        placed, dense, reranker = self.embedder.placed, self.dense, self.reranker
        assert placed is not None  # noqa: S101 - see above
        embedders = [self.embedder, dense] if dense else [self.embedder]
        return LoadedModels(
            cast(Embedder, self.embedder.loaded),
            tuple(each.device for each in placed.models),
            min(each.max_batch_tokens for each in embedders),
            cast(Embedder, dense.loaded) if dense else None,
            cast(Reranker, reranker.loaded) if reranker else None,
            self.late_interaction,
            reranker.max_batch_tokens if reranker else None,
            tuple(each.info for each in self.members if each.info is not None),
            placed.demo,
        )

    def forget(self) -> None:
        """Keep nothing of a model that is to be unloaded."""
        vars(self).pop("loaded", None)
