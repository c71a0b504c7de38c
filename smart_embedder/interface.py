"""The interface between the engine and its models, and the records that a loader returns.

`smart_embedder.models` implements both. This module does not know how a model computes or where its
files are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, Self, cast, get_args

from smart_embedder.requests import (
    CUT_AT_END,
    AnyRequest,
    EmbedRequest,
    ExtractRequest,
    InputType,
    Outputs,
    TruncationOptions,
)
from smart_embedder.results import FloatArray, Span
from smart_embedder.settings import EngineSettings, ModelEntry
from smart_embedder.tokens import (
    SpecialToken,
    TextWindows,
    TokenIds,
    TokenizedPair,
    TokenizedText,
    TokenSpans,
)
from smart_embedder.vector_space import SCORE, VECTORS, VectorSpace

# The share of its time limit that a request may wait for a load; the rest is for its own work.
SHARE_FOR_LOADING = 0.9

# The prompt names that encode_query and encode_document of sentence-transformers look for.
PROMPT_NAMES: dict[InputType | None, tuple[str, ...]] = {
    None: (),
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}
# Bytes used by the operating system, or by the context of a process on a GPU.
_SYSTEM_BYTES = 2**30
_MEGABYTE, _GIGABYTE = 10**6, 10**9


class Model(Protocol):
    """A loaded model that runs forwards.

    - `name` is its public name, as in responses.
    - `max_length` is the token limit of a sequence, special tokens included.
    - `max_batch_sequences` limits the sequences of a forward; None means no limit.
    - `special_tokens` are the tokens before and after every text.
    - `spaces` maps each kind of its vectors, or `score`, to its vector space.
    """

    name: str
    max_length: int
    max_batch_sequences: int | None
    special_tokens: tuple[list[SpecialToken], list[SpecialToken]]
    spaces: Mapping[str, VectorSpace]

    @property
    def reproducible(self) -> bool:
        """True if the results of a text are bit-identical whatever else is in the batch."""

    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], Sequence[Any]]:
        """Launch the forward of a batch in the device thread, with the `outputs` of each sequence.

        Returns a function that can be called in any thread: it waits for the forward and returns a
        result for each sequence, in order. If a result has numbers that are not finite, it is an
        `InferenceError` instead.
        """

    def token_spans(self, text: str) -> Iterator[TokenSpans]:
        """Yield the tokens of a whole text, slice by slice; safe to call from several threads."""


class Embedder(Model, Protocol):
    """A model whose results are `TextEmbedding`s.

    - `kinds` are the kinds of vectors that it computes.
    - `dense_width` is the number of dimensions of a dense vector, and `colbert_width` that of each
      ColBERT vector, 0 without any.
    - `pooling` is the method that makes a dense vector of hidden states, such as `cls` or `mean`.
    - `normalizes` is True if dense vectors always have unit length.
    - `similarity` is how dense vectors are compared: `cosine`, or `dot` for their product.
    - `min_dimensions` is the lowest number of dimensions that it was trained for; None if it was
      trained only for all.
    - `prompts` are the prompts of its sentence-transformers configuration, by name. Requests that
      select none use `default_prompt`.
    - `reads_input_type` is True if it distinguishes queries and documents, apart from prompts.
    - `reads_images` is True if it reads pictures.
    """

    kinds: Outputs
    dense_width: int
    colbert_width: int
    pooling: str
    normalizes: bool
    similarity: str
    min_dimensions: int | None
    prompts: Mapping[str, str]
    default_prompt: str
    reads_input_type: bool
    reads_images: bool

    def tokenize(
        self,
        texts: list[Any],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Tokenize each text, after `prompt`; safe to call from several threads.

        With `reads_images`, an `ImageInput` may stand in place of a text.
        """

    def colbert_tokens(self, ids: TokenIds) -> TokenIds:
        """Return the token of each ColBERT vector of the sequence `ids`."""

    def token_strings(self, ids: TokenIds) -> list[str]:
        """Return the strings of these tokens in the vocabulary."""


class Reranker(Model, Protocol):
    """A model whose results are logits, by which passages are ranked.

    The sigmoid of a logit divided by `temperature` is the probability that a passage is relevant.
    With `always_normalizes`, it is the score of every request. `reads_instruction` is True if the
    model reads an instruction.
    """

    reads_instruction: bool
    always_normalizes: bool
    temperature: float

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Tokenize the query with each passage; safe to call from several threads."""


class Extractor(Model, Protocol):
    """A model that finds spans of texts; its results are scores of labels.

    Requests that name no threshold get the `default_threshold`. `reads_labels` is True if it finds
    the labels of a request, and False if it has labels of its own.
    """

    default_threshold: float
    reads_labels: bool

    def check_options(self, request: ExtractRequest) -> None:
        """Raise `InvalidRequestError` for labels or an aggregation that it cannot use."""

    def token_bytes(self, request: ExtractRequest) -> int:
        """Return how many bytes the request holds for each token of its texts."""

    def tokenize_windows(
        self, request: ExtractRequest, check: Callable[[int], None]
    ) -> list[TextWindows]:
        """Tokenize whole texts, in windows of at most `max_length` tokens.

        Calls `check` with the tokens of all texts so far, which raises an error if there are too
        many. Safe to call from several threads.
        """

    def find_spans(
        self, text: str, read: TextWindows, results: Sequence[FloatArray], request: ExtractRequest
    ) -> Iterator[Span]:
        """Find the spans of a text in the results of its windows; safe in several threads.

        They may include some with other labels, or below the threshold.
        """


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that models run on, as in /health and /stats.

    On a GPU, `read_memory` returns bytes by kind: allocated, reserved, free or total.
    `host_memory_left` returns the bytes of host memory that the process may still allocate.
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
    """An implementation of an operation that failed the proof at startup, and the reason."""

    operation: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """How a model is computed: its number format, and the implementation of each operation.

    `kernels` names the instruction set and the sources of the C kernels, None if none is used.
    `reproducible` is as in `Model`, and `vector_space` has an id for each kind.
    """

    name: str
    dtype: str
    paths: dict[str, str]
    refused: tuple[RefusedPath, ...] = ()
    kernels: str | None = None
    reproducible: bool = False
    vector_space: dict[str, str] = field(default_factory=dict)


class ModelState(Enum):
    """The state of a model. The load of a `FAILED` model may be retried after a pause."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelAbilities:
    """The abilities of a model, as in /v1/models and /info.

    `kinds` are `dense`, `sparse` or `colbert`, `scores` of a reranker, or `spans`. `input_types`
    are those that change how it reads a text, `max_length` is its token limit, `reads_images` is as
    in `Embedder`, and `reads_labels` as in `Extractor`.
    """

    kinds: tuple[str, ...]
    input_types: tuple[str, ...]
    max_length: int
    reads_images: bool = False
    reads_labels: bool = False

    @classmethod
    def of(cls, model: Model, task: str) -> Self:
        """Return the abilities of a model with this task."""
        if task == "rerank":
            return cls(("scores",), (), model.max_length)
        if task == "extract":
            reads_labels = cast(Extractor, model).reads_labels
            return cls(("spans",), (), model.max_length, reads_labels=reads_labels)
        embedder = cast(Embedder, model)
        kinds = tuple(kind for kind in VECTORS if getattr(embedder.kinds, kind))
        types = tuple(kind for kind in get_args(InputType) if has_prompt_for(embedder, kind))
        return cls(kinds, types, model.max_length, embedder.reads_images)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of one model.

    `requests` is the number of requests that use it or wait for it, None for a default model.
    `load_seconds` is the duration of its latest load, and `reason` tells why a load failed or
    waits. `files_replaced` counts the loads that found changed files. While the model is
    loaded, `info` describes how it is computed, `makes` what it computes, and `token_budgets` are
    the token budgets of a forward on each device.
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
    """The total and the used bytes of a memory; `own` is the part of this process."""

    used: int
    total: int
    own: int | None = None

    @property
    def of_others(self) -> int:
        """The bytes of other programs, without those of the operating system; 0 if unknown."""
        if self.own is None:
            return 0
        return max(0, self.used - self.own - min(_SYSTEM_BYTES, self.total // 10))


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a model's forwards on a device."""

    max_batch_tokens: int
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on one device.

    - `measure(thorough)` runs the first forwards in steps in the device thread, unless another copy
      has been measured. It yields None after each step, so that the thread can do other work, and
      then the measurement. If not `thorough`, it measures fewer lengths, so that other work waits
      less.
    - `free_memory` makes the allocator of the device release unused memory.
    - `prepare_thread` is called first in each thread that computes on the device.
    """

    model: Model
    device: DeviceInfo
    measure: Callable[[bool], Iterator[Measured | None]]
    free_memory: Callable[[], object]
    prepare_thread: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PlacedModels:
    """A model with a copy on each of its devices.

    Once the model is measured, `describe` returns how it is computed. `demo` says what a demo model
    must not be used for.
    """

    models: tuple[PlacedModel, ...]
    describe: Callable[[], ModelInfo]
    demo: str | None = None


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that its devices serve, with a token budget that holds on each of them."""

    placed: PlacedModels
    info: ModelInfo
    max_batch_tokens: int

    @property
    def model(self) -> Model:
        """The model of jobs, which is the copy on the first device."""
        return self.placed.models[0].model


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How to load a model: `needs` maps each memory to the bytes that the model needs of it.

    `files` identifies the model's files. It differs from that of an earlier plan if they have
    changed.
    """

    needs: Mapping[str, int]
    load: Callable[[], PlacedModels]
    files: str = ""


class ModelLoader(Protocol):
    """Loads single models in the loader thread while others serve."""

    def prepare_thread(self) -> None:
        """Give the calling thread a lower priority."""

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """Find or download the model's files; raise `StartupError` if there are none."""

    def read_memory(self, name: str) -> MemoryUsage:
        """Read the usage of a memory that is named in a plan."""

    def free_memory(self) -> None:
        """Release the memory of unloaded models to the system."""


@dataclass(frozen=True, slots=True)
class DefaultModels:
    """The models of `EngineSettings.default_entries`, in that order, and the loader of others."""

    models: tuple[PlacedModels, ...]
    loader: ModelLoader


Loader = Callable[[EngineSettings], DefaultModels]


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models that serve a request together, each on all of its devices.

    - `dense` is the separate model for dense vectors, if there is one.
    - With `late_interaction`, `embedder` reranks. Otherwise `reranker` does, if there is one.
    - `extractor` is the model of MODELS that a request for spans names.
    - `max_batch_tokens` is the token budget of the embedders, `max_rerank_tokens` that of the
      reranker.
    - `devices` are the devices of the embedder.
    - `infos` describe how each model is computed, and `demo` is the warning of a demo model.
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
    extractor: Extractor | None = None

    @classmethod
    def of(
        cls,
        embedders: Sequence[ReadyModel],
        reranker: ReadyModel | None = None,
        extractor: ReadyModel | None = None,
        *,
        late_interaction: bool = False,
    ) -> Self:
        """Combine models. Of two embedders, the second computes the dense vectors."""
        embedder, *dense = embedders
        members = [model for model in (*embedders, reranker, extractor) if model is not None]
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
            cast(Extractor, extractor.model) if extractor else None,
        )

    @property
    def device(self) -> DeviceInfo:
        """The first device."""
        return self.devices[0]

    @property
    def dense_model(self) -> Embedder:
        """The model that computes the dense vectors."""
        return self.embedder if self.dense is None else self.dense

    @property
    def kinds(self) -> Outputs:
        """The kinds of vectors that the models compute together."""
        dense, others = self.dense_model.kinds, self.embedder.kinds
        return Outputs(dense.dense, others.sparse, others.colbert)

    def get_dtype(self, model: Model) -> str:
        """Return the number format of one of these models."""
        dtypes = (info.dtype for info in self.infos if info.name == model.name)
        return next(dtypes, self.device.dtype)

    def models_by_kind(self, request: AnyRequest) -> dict[str, Model]:
        """Return the model that computes each kind of vectors, or the scores, of a response."""
        if isinstance(request, ExtractRequest):
            return {} if self.extractor is None else {SCORE: self.extractor}
        if not isinstance(request, EmbedRequest):
            if not self.late_interaction:
                return {} if self.reranker is None else {SCORE: self.reranker}
            return {kind: self.embedder for kind in VECTORS if getattr(self.kinds, kind)}
        return {
            kind: self.dense_model if kind == "dense" else self.embedder
            for kind in VECTORS
            if getattr(request.needed, kind)
        }

    def space_ids(self, request: AnyRequest) -> dict[str, str]:
        """Return the id of the vector space of each kind in the response."""
        return {
            kind: str(space.for_request(request))
            for kind, model in self.models_by_kind(request).items()
            if (space := model.spaces.get(kind)) is not None
        }

    def read_memory(self, kind: str) -> int:
        """Return the bytes of this kind on all devices that report them."""
        readers = (device.read_memory for device in self.devices)
        return sum(read(kind) for read in readers if read is not None)


@dataclass(frozen=True, slots=True)
class Download:
    """The progress of a model's download: `done` of `total` bytes."""

    model: str
    done: int
    total: int

    @property
    def percent(self) -> int:
        """The percentage of the bytes on the disk, rounded down: 100 only if all are there."""
        return 100 * self.done // self.total

    def __str__(self) -> str:
        return (
            f"{self.model} is being downloaded: {human_size(self.done)} of "
            f"{human_size(self.total)} ({self.percent} %)"
        )


class DownloadStatus:
    """The current download, or None. The loader's threads write it, and any thread reads it."""

    def __init__(self) -> None:
        self.current: Download | None = None


def has_prompt_for(model: Embedder, input_type: InputType) -> bool:
    """Return True if this input type changes how the model reads texts."""
    return model.reads_input_type or any(name in model.prompts for name in PROMPT_NAMES[input_type])


def human_size(count: int) -> str:
    """Format a number of bytes in GB, or in MB below 1 GB."""
    if count >= _GIGABYTE:
        return f"{count / _GIGABYTE:.1f} GB"
    return f"{count / _MEGABYTE:.0f} MB"
