"""The records that carry a request from stage to stage. No behaviour beyond derived values."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Which kinds of vectors are wanted."""

    dense: bool = False
    sparse: bool = False
    colbert: bool = False

    def __or__(self, other: "Outputs") -> "Outputs":
        return Outputs(
            self.dense or other.dense, self.sparse or other.sparse, self.colbert or other.colbert
        )


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model reads it: `ids` with special tokens, cut to the model's limit."""

    ids: TokenIds
    original_tokens: int

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut off."""
        return self.original_tokens > len(self.ids)


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Lexical weights: `values[i]` float32 > 0 for the token id `indices[i]`, ids ascending."""

    indices: npt.NDArray[np.int64]
    values: FloatArray


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """The vectors of one text; a kind not asked for is None.

    `dense` is `[width]` and `colbert` `[tokens - 1, colbert width]`, both float32.
    """

    dense: FloatArray | None = None
    sparse: SparseVector | None = None
    colbert: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """The text at `index` had `original_tokens`; `model` read only the first `max_tokens`."""

    index: int
    model: str
    max_tokens: int
    original_tokens: int

    @property
    def truncated_tokens(self) -> int:
        """How many tokens the model did not read."""
        return self.original_tokens - self.max_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in each stage; `queue` is all waiting outside a forward."""

    tokenize: float
    queue: float
    inference: float
    total: float


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """What `Engine.embed` returns: one `TextEmbedding` for each text, in the order given."""

    embeddings: list[TextEmbedding]
    truncations: list[Truncation]
    tokens: int
    timings: Timings


class Model(Protocol):
    """A loaded model as the engine sees it; it is called from the device thread alone."""

    @property
    def name(self) -> str:
        """The name that answers carry."""

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence, special tokens included."""

    def tokenize(self, texts: list[str]) -> list[TokenizedText]:
        """Token ids of each text; safe to call from several threads."""

    def forward(self, sequences: list[TokenIds], outputs: Outputs) -> list[TextEmbedding]:
        """Run one batch; one result for each sequence, in order, at least the kinds asked for."""


@dataclass(slots=True, eq=False)
class Job:
    """The work of one request for one model.

    Its sequences go to the device in order, over one or more batches. `taken` counts those handed
    to the device, `finished` those that came back; `departed` is set once it has left the queue.
    `virtual_start` places it among its rivals: see `app.engine.batcher`.
    """

    model: Model
    sequences: list[TokenIds]
    outputs: Outputs
    future: "asyncio.Future[list[Any]]"
    enqueued_at: float
    virtual_start: float = 0.0
    departed: asyncio.Event = field(default_factory=asyncio.Event)
    taken: int = 0
    finished: int = 0
    first_taken_at: float | None = None
    inference_seconds: float = 0.0
    results: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.results = [None] * len(self.sequences)

    @property
    def waiting(self) -> bool:
        """Whether it has sequences that still wait for the device."""
        return self.taken < len(self.sequences)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a batch that belongs to one job: its sequences `start` to `stop`."""

    job: Job
    start: int
    stop: int

    @property
    def sequences(self) -> list[TokenIds]:
        """The token ids of this part."""
        return self.job.sequences[self.start : self.stop]

    @property
    def tokens(self) -> int:
        """Tokens of this part."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward runs: parts of one or more jobs for the same model."""

    model: Model
    shares: list[Share]

    @property
    def sequences(self) -> list[TokenIds]:
        """The token ids of every sequence, share after share."""
        return [ids for share in self.shares for ids in share.sequences]

    @property
    def outputs(self) -> Outputs:
        """The union of what the jobs want."""
        union = Outputs()
        for share in self.shares:
            union |= share.job.outputs
        return union

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(share.tokens for share in self.shares)
