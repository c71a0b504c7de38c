"""The memory that is left for models, and the models that could be unloaded to make room."""

import asyncio
from collections.abc import Iterable, Sequence

from app.engine.download import human_size
from app.engine.loaded_models import ModelLoader
from app.engine.model_pool.pooled_model import PooledModel
from app.errors import MemoryTakenError, ModelTooLargeError


class ModelMemory:
    """The memories that `models` are in, of which at most the share `threshold` may be in use."""

    def __init__(
        self, models: Sequence[PooledModel], loader: ModelLoader, threshold: float
    ) -> None:
        self._models = models
        self._loader = loader
        self._threshold = threshold

    @property
    def in_use(self) -> list[str]:
        """The memories that have models in them."""
        return list(dict.fromkeys(memory for model in self.unpinned() for memory in model.needs))

    def unpinned(self, memory: str | None = None) -> list[PooledModel]:
        """The loaded models, in this memory or in any, the least recently used first."""
        loaded = (
            model
            for model in self._models
            if model.residence is not None
            and not model.entry.pinned
            and (memory is None or memory in model.needs)
        )
        return sorted(loaded, key=lambda model: model.last_used)

    async def left(self, memory: str) -> int:
        """Bytes that are free below the threshold; negative if more is in use."""
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        return int(usage.total * self._threshold) - usage.used

    async def shortage_for(self, model: PooledModel, memory: str) -> int:
        """Bytes that the model needs beyond those left; negative if it fits."""
        return model.needs[memory] - await self.left(memory)

    def is_enough(self, memory: str, shortage: int, others: Iterable[PooledModel]) -> bool:
        """Whether the shortage is over once all `others` are unloaded."""
        return shortage <= sum(other.needs[memory] for other in others)

    async def refusal_of(
        self, model: PooledModel, memory: str, shortage: int, others: Iterable[PooledModel]
    ) -> MemoryTakenError | ModelTooLargeError:
        """The error of a model that does not fit even with all `others` unloaded.

        `MemoryTakenError` where it would fit without the memory of other programs.
        """
        needed, freed = model.needs[memory], sum(other.needs[memory] for other in others)
        usage = await asyncio.to_thread(self._loader.read_memory, memory)
        if shortage - freed <= usage.of_others:
            return MemoryTakenError(
                f"the model {model.name} needs {human_size(needed)} of the memory of {memory}, of "
                f"which other programs hold {human_size(usage.of_others)}: it is loaded when they "
                "have left enough"
            )
        return ModelTooLargeError(
            f"the model {model.name} needs {human_size(needed)} of the memory of {memory}, and at "
            f"most {human_size(max(0, needed - shortage + freed))} can be had below "
            f"MODEL_MEMORY_THRESHOLD={self._threshold:g}, where pinned models and the default ones "
            "stay"
        )
