"""A model of MODELS: its state, its leases, and how long it takes to load."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from app.engine.file_watch import FileWatch
from app.engine.loaded_models import LoadedModels, PlacedModels
from app.engine.model import Embedder, Model, Reranker
from app.engine.model_state import ModelState, ModelStatus
from app.errors import (
    ModelNotLoadedError,
    ModelTooLargeError,
    SmartEmbedderError,
    UnavailableError,
)
from app.settings.model_entry import ModelEntry

# Seconds until a model that could not be loaded is tried again.
_PAUSE_AFTER_FAILURE = 30.0
# The expected seconds of loading a model of unknown size.
_UNKNOWN_TIME = 10.0


@dataclass(frozen=True, slots=True)
class Residence:
    """A loaded model: `model` is the one of its jobs, `models` what its requests use."""

    model: Model
    models: LoadedModels
    watch: FileWatch


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model; to be used in the event loop's thread only.

    `leases` counts the requests that use it or wait for it. `needs` are the bytes that it takes of
    each memory, empty until they are known. The result of `loading` is the error, if it fails.
    """

    entry: ModelEntry
    state: ModelState = ModelState.UNLOADED
    leases: int = 0
    last_used: float = 0.0
    needs: Mapping[str, int] = field(default_factory=dict)
    residence: Residence | None = None
    loading: "asyncio.Task[SmartEmbedderError | None] | None" = None
    load_seconds: float | None = None
    _began: float = 0.0
    _failed_at: float = 0.0
    _failure: UnavailableError | None = None

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.entry.public_name

    @property
    def nbytes(self) -> int:
        """The bytes that it takes of all memories together."""
        return sum(self.needs.values())

    def begin(self) -> None:
        """Loading begins."""
        self.state, self._began = ModelState.LOADING, time.monotonic()

    def succeed(self, residence: Residence) -> float:
        """Loading has succeeded; return the seconds that it took."""
        self.state, self.residence = ModelState.READY, residence
        self.last_used = time.monotonic()
        self.load_seconds = self.last_used - self._began
        return self.load_seconds

    def fail(self, too_large: ModelTooLargeError | None) -> None:
        """Loading has failed: refuse requests until a pause is over."""
        self.state, self._failed_at = ModelState.FAILED, time.monotonic()
        # The reason of any other failure may name folders of this machine.
        told = f"the model {self.name} could not be loaded; the log says why"
        self._failure = too_large or ModelNotLoadedError(told)

    def leave(self) -> Residence | None:
        """Become unloaded; return the residence that it had."""
        residence, self.residence = self.residence, None
        self.state = ModelState.UNLOADED
        return residence

    @property
    def refusal(self) -> UnavailableError | None:
        """The error of requests during the pause after a failure; None at other times."""
        left = math.ceil(self._failed_at + _PAUSE_AFTER_FAILURE - time.monotonic())
        if self.state is not ModelState.FAILED or left <= 0 or self._failure is None:
            return None
        # Waiting alone makes no room.
        seconds = None if isinstance(self._failure, ModelTooLargeError) else left
        return type(self._failure)(str(self._failure), retry_after=seconds)

    def seconds_left(self, bytes_per_second: float) -> float:
        """Seconds until its loading, which has begun, will be over; at least 1."""
        expected = self.load_seconds or self.nbytes / bytes_per_second or _UNKNOWN_TIME
        elapsed = time.monotonic() - self._began
        # Loading that takes longer than expected is expected to take half as long again.
        return max(1.0, expected - elapsed, elapsed / 2 if elapsed > expected else 0.0)

    @property
    def status(self) -> ModelStatus:
        """The state, as /health shows it."""
        residence, has_failed = self.residence, self.state is ModelState.FAILED
        models = residence and residence.models
        return ModelStatus(
            self.name,
            self.entry.task,
            self.state,
            pinned=self.entry.pinned,
            requests=self.leases,
            load_seconds=self.load_seconds,
            reason=str(self._failure) if has_failed else None,
            info=models.infos[-1] if models else None,
        )


def models_with(placed: PlacedModels, task: str, defaults: LoadedModels) -> LoadedModels:
    """The models of its requests: an embedder alone, or a reranker beside the default models."""
    place, info = placed.places[0], placed.describe()
    if task == "rerank":
        infos = (*defaults.infos, info)
        reranker = cast(Reranker, place.model)
        return replace(defaults, reranker=reranker, late_interaction=False, infos=infos)
    return LoadedModels(
        embedder=cast(Embedder, place.model),
        device=place.device,
        max_batch_tokens=defaults.max_batch_tokens,
        infos=(info,),
        fingerprints={place.model: placed.fingerprint},
    )
