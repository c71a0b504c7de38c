"""The models' interface, as the engine calls it, and what a loader hands over.

`smart_embedder.models` implements both; nothing here knows how a model computes or where its files
lie.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, Self, cast, get_args

from smart_embedder.requests import (
    CUT_AT_END,
    EmbedRequest,
    InputType,
    Outputs,
    RerankRequest,
    TruncationOptions,
)
from smart_embedder.settings import EngineSettings, ModelEntry
from smart_embedder.tokens import (
    SpecialToken,
    TokenIds,
    TokenizedPair,
    TokenizedText,
    TokenSpans,
)
from smart_embedder.vector_space import SCORE, VECTORS, VectorSpace

# The share of a request's time that it may wait for a load; the rest is for its own work.
SHARE_FOR_LOADING = 0.9

# The names of prompts that sentence-transformers' encode_query and encode_document look for.
PROMPT_NAMES: dict[InputType | None, tuple[str, ...]] = {
    None: (),
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}
# The kernel and its services, or the context of a process on a GPU.
_OF_SYSTEM = 2**30
_MEGABYTE, _GIGABYTE = 10**6, 10**9


class Model(Protocol):
    """A loaded model as the device thread sees it.

    `name` is that of its answers, and `max_length` the most tokens of one sequence, special tokens
    included. `max_batch_sequences` are the most in one forward, None for no limit. `special_tokens`
    are those before, and those after, every text. `spaces` are those of its vectors, by kind, or
    that of its scores.
    """

    name: str
    max_length: int
    max_batch_sequences: int | None
    special_tokens: tuple[list[SpecialToken], list[SpecialToken]]
    spaces: Mapping[str, VectorSpace]

    @property
    def reproducible(self) -> bool:
        """Whether a text's results are the same to the last bit, whatever is beside it."""

    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], Sequence[Any]]:
        """Launch the forward of one batch, in the device thread, with `outputs` of each sequence.

        Returns a function that waits for the forward, in any thread, and returns a result for each
        sequence, in order. The result is an `InferenceError` for a sequence that has made a number
        that is not finite.
        """

    def token_spans(self, text: str) -> Iterator[TokenSpans]:
        """The tokens of a whole text, slice by slice; safe to call from several threads."""


class Embedder(Model, Protocol):
    """A model whose results are `TextEmbedding`s, with None for kinds not asked for or not made.

    - `kinds` are those that it makes. A dense vector has `dense_width` numbers, and each ColBERT
      vector `colbert_width`, 0 where it makes none.
    - `pooling` is how hidden states become a dense vector, such as `cls` or `mean`. With
      `normalizes` that always has unit length. `min_dimensions` are the fewest that the model was
      trained for; None if it was trained for all only.
    - `prompts` are those of its sentence-transformers configuration by name, and `default_prompt`
      that of requests that name none. With `reads_input_type` it reads queries and documents
      differently, apart from their prompts.
    """

    kinds: Outputs
    dense_width: int
    colbert_width: int
    pooling: str
    normalizes: bool
    min_dimensions: int | None
    prompts: Mapping[str, str]
    default_prompt: str
    reads_input_type: bool

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Token ids of each text behind `prompt`; safe to call from several threads."""

    def colbert_tokens(self, ids: TokenIds) -> TokenIds:
        """The token behind each ColBERT vector of the sequence `ids`."""

    def token_strings(self, ids: TokenIds) -> list[str]:
        """The strings of these tokens in the vocabulary."""


class Reranker(Model, Protocol):
    """A model whose results are scores.

    With `reads_instruction` it reads an instruction; with `scores_are_logits` the sigmoid of a
    score is a probability.
    """

    reads_instruction: bool
    scores_are_logits: bool

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Token ids of the query with each passage; safe to call from several threads."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The hardware that the models run on, as /health and /stats show it.

    On a GPU, `read_memory` returns bytes by kind: allocated, reserved, free or total.
    `host_memory_left` returns the bytes that the process may still take beside it.
    """

    name: str
    description: str
    dtype: str
    attention: str
    gpu_available: bool = False
    device_count: int = 0
    memory_bytes: int | None = None
    read_memory: Callable[[str], int] | None = None
    host_memory_left: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True)
class RefusedPath:
    """An implementation of an operation that failed the proof at the start, and why."""

    operation: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """How a model is computed: its number format, and the implementation of each operation.

    `kernels` names the instructions and the sources of the kernels in C, None where no operation
    is one of theirs. `reproducible` is as in `Model`; `vector_space` has an id for each kind.
    """

    name: str
    dtype: str
    paths: dict[str, str]
    refused: tuple[RefusedPath, ...] = ()
    kernels: str | None = None
    reproducible: bool = False
    vector_space: dict[str, str] = field(default_factory=dict)


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

    @classmethod
    def of(cls, model: Model, task: str) -> Self:
        """Those of a model whose task is to embed or to rerank."""
        if task != "embed":
            return cls(("scores",), (), model.max_length)
        embedder = cast(Embedder, model)
        kinds = tuple(kind for kind in VECTORS if getattr(embedder.kinds, kind))
        types = tuple(kind for kind in get_args(InputType) if has_prompt_for(embedder, kind))
        return cls(kinds, types, model.max_length)


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


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The size of a memory and how much of it is in use, in bytes; `own` is this process's part."""

    used: int
    total: int
    own: int | None = None

    @property
    def of_others(self) -> int:
        """What other programs hold, apart from what the system itself needs; 0 if not known."""
        if self.own is None:
            return 0
        return max(0, self.used - self.own - min(_OF_SYSTEM, self.total // 10))


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a model's forwards on a device."""

    max_batch_tokens: int
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on one device.

    `measure` runs its first forwards, unless those of a copy that it shares were run, in steps,
    each in the device's thread, which may do other work between two: it yields None after each
    step, and then the measurement. Called with false, it measures less, so that the other work
    hardly waits. `free_memory` makes the device's allocator return memory that it does not use.
    `prepare_thread` is called first in each thread that computes there.
    """

    model: Model
    device: DeviceInfo
    measure: Callable[[bool], Iterator[Measured | None]]
    free_memory: Callable[[], object]
    prepare_thread: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PlacedModels:
    """One model on all of its devices.

    `describe` tells how it is computed, once measured; `demo` what a demo model is not for.
    """

    models: tuple[PlacedModel, ...]
    describe: Callable[[], ModelInfo]
    demo: str | None = None


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """One model that its devices serve; a forward may hold `max_batch_tokens` on each."""

    placed: PlacedModels
    info: ModelInfo
    max_batch_tokens: int

    @property
    def model(self) -> Model:
        """The model of its jobs."""
        return self.placed.models[0].model


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How to load a model: `needs` are the bytes that it takes of each memory, by name.

    `files` differs from that of an earlier plan if the model's files were changed or replaced.
    """

    needs: Mapping[str, int]
    load: Callable[[], PlacedModels]
    files: str = ""


class ModelLoader(Protocol):
    """Loads single models in its own thread while others serve."""

    def prepare_thread(self) -> None:
        """Give the calling thread a lower priority."""

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """Find the model's files, which may be downloaded; raises `StartupError` without them."""

    def read_memory(self, name: str) -> MemoryUsage:
        """The usage of a memory that is named in a plan."""

    def free_memory(self) -> None:
        """Return the memory of unloaded models to the system."""


@dataclass(frozen=True, slots=True)
class DefaultModels:
    """The models of `Settings.default_entries`, in that order, and the loader of all others."""

    models: tuple[PlacedModels, ...]
    loader: ModelLoader


Loader = Callable[[EngineSettings], DefaultModels]


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models that work together for a request, each on all of its devices.

    `dense` is the separate model for dense vectors, if there is one. With `late_interaction`,
    `embedder` reranks; otherwise `reranker` does, if there is one, and its forward may hold
    `max_rerank_tokens`. That of an embedder may hold `max_batch_tokens`. `devices` are those of the
    embedder, `infos` tell how each is computed, and `demo` what a demo model is not for.
    """

    embedder: Embedder
    devices: tuple[DeviceInfo, ...]
    max_batch_tokens: int
    dense: Embedder | None = None
    reranker: Reranker | None = None
    late_interaction: bool = False
    max_rerank_tokens: int | None = None
    infos: tuple[ModelInfo, ...] = ()
    demo: str | None = None

    @classmethod
    def of(
        cls,
        embedders: Sequence[ReadyModel],
        reranker: ReadyModel | None = None,
        *,
        late_interaction: bool = False,
    ) -> Self:
        """These models together; of two embedders the second makes the dense vectors."""
        embedder, *dense = embedders
        members = [*embedders, reranker] if reranker else embedders
        return cls(
            cast(Embedder, embedder.model),
            tuple(copy.device for copy in embedder.placed.models),
            min(ready.max_batch_tokens for ready in embedders),
            cast(Embedder, dense[0].model) if dense else None,
            cast(Reranker, reranker.model) if reranker else None,
            late_interaction,
            reranker.max_batch_tokens if reranker else None,
            tuple(ready.info for ready in members),
            embedder.placed.demo,
        )

    @property
    def device(self) -> DeviceInfo:
        """The first of the devices."""
        return self.devices[0]

    @property
    def dense_model(self) -> Embedder:
        """The model that makes the dense vectors."""
        return self.embedder if self.dense is None else self.dense

    @property
    def kinds(self) -> Outputs:
        """The kinds of vectors that the models make together."""
        dense, rest = self.dense_model.kinds, self.embedder.kinds
        return Outputs(dense.dense, rest.sparse, rest.colbert)

    def dtype_of(self, model: Model) -> str:
        """The number format of one of these models."""
        own = (info.dtype for info in self.infos if info.name == model.name)
        return next(own, self.device.dtype)

    def made_by(self, request: EmbedRequest | RerankRequest) -> dict[str, Model]:
        """The model behind each kind in the answer, be it of vectors or of scores."""
        if not isinstance(request, EmbedRequest):
            if not self.late_interaction:
                return {} if self.reranker is None else {SCORE: self.reranker}
            return {kind: self.embedder for kind in VECTORS if getattr(self.kinds, kind)}
        return {
            kind: self.dense_model if kind == "dense" else self.embedder
            for kind in VECTORS
            if getattr(request.needed, kind)
        }

    def spaces_of(self, request: EmbedRequest | RerankRequest) -> dict[str, str]:
        """The id of the space of each kind in the answer."""
        return {
            kind: str(space.of(request))
            for kind, model in self.made_by(request).items()
            if (space := model.spaces.get(kind)) is not None
        }

    def read_memory(self, kind: str) -> int:
        """Bytes of this kind, on all devices that report them."""
        readers = (device.read_memory for device in self.devices)
        return sum(read(kind) for read in readers if read is not None)


@dataclass(frozen=True, slots=True)
class Download:
    """How much of a model's files is on the disk: `done` of `total` bytes."""

    model: str
    done: int
    total: int

    @property
    def percent(self) -> int:
        """The share of the bytes on the disk, rounded down: 100 only when all are there."""
        return 100 * self.done // self.total

    def __str__(self) -> str:
        return (
            f"{self.model} is being downloaded: {human_size(self.done)} of "
            f"{human_size(self.total)} ({self.percent} %)"
        )


class DownloadStatus:
    """The running download, or None; written by the loader's threads, read by any thread."""

    def __init__(self) -> None:
        self.current: Download | None = None


def has_prompt_for(model: Embedder, input_type: InputType) -> bool:
    """Whether this input type changes how the model reads texts."""
    return model.reads_input_type or any(name in model.prompts for name in PROMPT_NAMES[input_type])


def human_size(count: int) -> str:
    """A number of bytes as text, in GB or, below one of them, in MB."""
    if count >= _GIGABYTE:
        return f"{count / _GIGABYTE:.1f} GB"
    return f"{count / _MEGABYTE:.0f} MB"
