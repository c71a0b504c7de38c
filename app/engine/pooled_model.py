"""A model of MODELS in this process: its state, who uses it, and how long it takes to load."""

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

# Until a model that failed is tried again, in seconds.
_PAUSE_AFTER_FAILURE = 30.0
# Where nothing is known of a model's size, in seconds.
_UNKNOWN_TIME = 10.0


@dataclass(frozen=True, slots=True)
class Residence:
    """A model while it is loaded: `model` is that of its jobs, `models` what its requests use."""

    model: Model
    models: LoadedModels
    watch: FileWatch


@dataclass(slots=True, eq=False)
class PooledModel:
    """One model; all of it belongs to the event loop's thread.

    `leases` are the requests that use it or wait for it, and `needs` the bytes of each memory, as
    far as they are known yet. `loading` ends with the reason where it could not be loaded.
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
        """Its bytes in all memories together."""
        return sum(self.needs.values())

    def begin(self) -> None:
        """Begin to load."""
        self.state, self._began = ModelState.LOADING, time.monotonic()

    def succeed(self, residence: Residence) -> float:
        """Serve from now on; returns the seconds that loading took."""
        self.state, self.residence = ModelState.READY, residence
        self.last_used = time.monotonic()
        self.load_seconds = self.last_used - self._began
        return self.load_seconds

    def fail(self, too_large: ModelTooLargeError | None) -> None:
        """Serve nobody until the pause after a failure is over."""
        self.state, self._failed_at = ModelState.FAILED, time.monotonic()
        # The reason of any other failure may name folders of this machine.
        told = f"the model {self.name} could not be loaded; the log says why"
        self._failure = too_large or ModelNotLoadedError(told)

    def leave(self) -> Residence | None:
        """Serve nobody until it is loaded again; returns what it had."""
        residence, self.residence = self.residence, None
        self.state = ModelState.UNLOADED
        return residence

    @property
    def refusal(self) -> UnavailableError | None:
        """What requests are told while the pause after a failure lasts."""
        left = math.ceil(self._failed_at + _PAUSE_AFTER_FAILURE - time.monotonic())
        if self.state is not ModelState.FAILED or left <= 0 or self._failure is None:
            return None
        # Waiting alone makes no room.
        seconds = None if isinstance(self._failure, ModelTooLargeError) else left
        return type(self._failure)(str(self._failure), retry_after=seconds)

    def seconds_left(self, bytes_per_second: float) -> float:
        """Until its loading, which has begun, will be over; never less than a second."""
        expected = self.load_seconds or self.nbytes / bytes_per_second or _UNKNOWN_TIME
        elapsed = time.monotonic() - self._began
        # What takes longer than it was to take is told to take half as long again.
        return max(1.0, expected - elapsed, elapsed / 2 if elapsed > expected else 0.0)

    @property
    def status(self) -> ModelStatus:
        """For those who watch the service."""
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
    """What requests for one model use: it alone, or as the reranker beside the default models."""
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
