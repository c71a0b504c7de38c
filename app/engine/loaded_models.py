"""What loaders return: warm models, their device, and the token budget of a forward.

A loader loads what the settings name at the start; from then on another loads single models.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from app import __version__
from app.engine.file_watch import WatchedFiles
from app.engine.model import Embedder, Model, Reranker
from app.engine.types import Outputs
from app.settings import Settings
from app.settings.model_entry import ModelEntry


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The hardware that the models run on, in words and numbers for /health and /stats.

    On a GPU, `read_memory` tells the bytes that are allocated, reserved, free or total.
    """

    name: str
    description: str
    dtype: str
    attention: str
    gpu_available: bool = False
    device_count: int = 0
    memory_bytes: int | None = None
    read_memory: Callable[[str], int] | None = None


@dataclass(frozen=True, slots=True)
class RefusedPath:
    """A path of an operation that failed its trial at the start, and why."""

    operation: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """How a model is computed: in which number format, and each operation of its layers by what."""

    name: str
    dtype: str
    paths: dict[str, str]
    refused: tuple[RefusedPath, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes of a memory: how many there are, and how many are in use."""

    used: int
    total: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a model's forwards on a device."""

    max_batch_tokens: int
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on one device.

    `measure` runs it for the first time, in the device's thread: thoroughly where it is given true,
    else so shortly that the device's other work hardly waits. The rest is as in `LoadedModels`.
    """

    model: Model
    device: DeviceInfo
    measure: Callable[[bool], Measured]
    free_memory: Callable[[], object]
    prepare_thread: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PlacedModels:
    """One model on all of its devices.

    `describe` says how it is computed once it was run, and `finish` does what can wait until it
    serves. `fingerprint` is as in `LoadedModels`.
    """

    places: tuple[PlacedModel, ...]
    describe: Callable[[], ModelInfo]
    files: WatchedFiles | None = None
    finish: Callable[[], object] = lambda: None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What loading a model takes: `needs` are bytes of each memory, by its name."""

    needs: Mapping[str, int]
    load: Callable[[], PlacedModels]


class ModelLoader(Protocol):
    """Loads single models, in a thread of its own, while others serve."""

    def prepare_thread(self) -> None:
        """Make the calling thread leave the processor to others."""

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """Find the model's files, which may be downloaded; raises `StartupError` without them."""

    def read_memory(self, name: str) -> MemoryUsage:
        """The usage of a memory that a plan names."""

    def free_memory(self) -> None:
        """Give back what models that were unloaded have left."""


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Everything a loader made: warm models, their device, and the token budget of one forward.

    `dense` makes the dense vectors where it is not bge-m3 itself. With `late_interaction` bge-m3
    reranks; else `reranker` does, or nobody. `demo` describes the demo model where one is served.
    `seconds_per_token` was measured at the start, and `free_memory` gives back what the device's
    allocator keeps without using it. `files` are those that the models read from while they serve.
    `replicas` are the same models on further devices. `infos` say how each model is computed.
    `fingerprints` tell the files of models apart, where that is needed.
    `prepare_thread` is called first in every thread that computes on the device. `loader` loads
    further models.
    """

    embedder: Embedder
    device: DeviceInfo
    max_batch_tokens: int
    dense: Embedder | None = None
    reranker: Reranker | None = None
    late_interaction: bool = False
    demo: str | None = None
    seconds_per_token: float = 0.0
    free_memory: Callable[[], object] = gc.collect
    files: WatchedFiles | None = None
    replicas: "tuple[LoadedModels, ...]" = ()
    infos: tuple[ModelInfo, ...] = ()
    fingerprints: Mapping[Model, str] = field(default_factory=dict)
    prepare_thread: Callable[[], None] | None = None
    loader: ModelLoader | None = None

    @property
    def dense_model(self) -> Embedder:
        """The model that makes the dense vectors."""
        return self.embedder if self.dense is None else self.dense

    @property
    def kinds(self) -> Outputs:
        """The kinds of vectors that are made; `embedder` leaves dense ones to `dense_model`."""
        dense, rest = self.dense_model.kinds, self.embedder.kinds
        return Outputs(dense.dense, rest.sparse, rest.colbert, dense.states)

    @property
    def each(self) -> list[Model]:
        """All models that run on the device."""
        models = (self.embedder, self.dense, self.reranker)
        return [model for model in models if model is not None]

    def dtype_of(self, model: Model) -> str:
        """The number format of one of them."""
        own = (info.dtype for info in self.infos if info.name == model.name)
        return next(own, self.device.dtype)

    def identity_of(self, model: Embedder) -> str:
        """What tells one of them from every other that may make different vectors of a text."""
        files = self.fingerprints.get(model, "")
        made = f"{self.dtype_of(model)} {model.max_length} {model.pooling}"
        return f"{__version__} {model.name} {files} {made}"

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [model.name for model in self.each]

    def read_memory(self, kind: str) -> int:
        """Bytes of a kind on all devices that can tell."""
        readers = (device.read_memory for device in self.devices)
        return sum(read(kind) for read in readers if read is not None)

    @property
    def devices(self) -> list[DeviceInfo]:
        """Every device that serves."""
        return [self.device, *(replica.device for replica in self.replicas)]


Loader = Callable[[Settings], LoadedModels]
