"""Which models wait to be loaded, in their order, and how long each has to wait."""

import math

from app.engine import clock
from app.engine.model_pool.pooled_model import PooledModel

# Bytes of a model that are loaded in a second, until one has been measured.
_USUAL_RATE = 200e6


class LoadingQueue:
    """The models that wait to be loaded, the one that is being loaded first."""

    def __init__(self) -> None:
        self._models: list[PooledModel] = []
        self._bytes_per_second = _USUAL_RATE
        self._room_at = -math.inf

    def add(self, model: PooledModel) -> None:
        """Let the model wait behind the others."""
        model.wait()
        self._models.append(model)

    def remove(self, model: PooledModel) -> None:
        """The model was loaded, or could not be."""
        self._models.remove(model)

    def expect_room(self, seconds: float) -> None:
        """The first model waits for memory, which others will have left after so many seconds."""
        self._room_at = clock.now() + seconds

    def note_room(self) -> None:
        """The first model waits for memory no longer."""
        self._room_at = -math.inf

    def note_speed(self, nbytes: int, seconds: float) -> None:
        """A model of so many bytes took so many seconds."""
        self._bytes_per_second = nbytes / max(seconds, 1e-3) or _USUAL_RATE

    def seconds_left(self, model: PooledModel) -> float:
        """Until the model is loaded, those before it included."""
        place = self._models.index(model) + 1 if model in self._models else 0
        models = self._models[:place] or [model]
        loading = sum(each.seconds_left(self._bytes_per_second) for each in models)
        return loading + max(0.0, self._room_at - clock.now())
